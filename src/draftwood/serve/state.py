"""Server options, and the objects that all endpoints share."""

import time
from dataclasses import dataclass

from starlette.types import Scope

from draftwood.drafters import check_drafter, drafter_names
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.serve.bodies import BodyReader
from draftwood.serve.connections import ConnectionLimits
from draftwood.serve.logs import RequestLog
from draftwood.serve.metrics import Metrics
from draftwood.serve.requests import RequestLimits
from draftwood.serve.runner import Runner

CLIENT, NOTES = "draftwood.client", "draftwood.notes"  # keys of a request's scope: whose it is; what its log entry says


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    names: tuple[str, ...]  # model names exposed by the API; the first one is the default of requests
    api_keys: tuple[str, ...] = ()  # one of them is required from clients; empty: no key
    share_cache: bool = False  # whether clients with different keys (without keys: addresses) reuse each other's cache
    allow_hosts: tuple[str, ...] = ()  # names in the Host header besides local ones, if there is no key
    allow_origin: str | None = None  # origin of web pages that may call the API; "*": any
    max_samples: int = 256  # running and queued samples; requests beyond it get status 503
    max_connections: int = 512
    max_connections_per_address: int = 256
    client_seconds: float = 30.0  # for sending headers, for sending a body, and for reading nothing
    playground: bool = True  # whether GET / returns a page to try the model
    strict: bool = False  # whether unknown request fields are an error; they are ignored otherwise
    request_log: str | None = None  # file for one line of JSON per request, without texts; "-": standard error


class ServerState:
    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.runner = Runner(llm, options.max_samples)
        self.bodies = BodyReader(llm.info.context_length, options.client_seconds)
        self.connections = ConnectionLimits(
            options.max_connections,
            options.max_connections_per_address,
            options.client_seconds,
            lambda: self.metrics.count_response("other", 503),
        )
        self.request_log = RequestLog(options.request_log)
        self.metrics = Metrics(
            {
                "open_samples": lambda: self.runner.num_open,
                "open_connections": lambda: self.connections.num_open,
                "held_body_bytes": lambda: self.bodies.num_held,
                "cache_tokens": lambda: llm.engine.target.num_slots,
                "cache_bytes": lambda: llm.engine.target.num_slots * llm.info.cache_bytes_per_token,
                "reserved_cache_tokens": lambda: llm.engine.num_reserved,
            }
        )
        self.limits = RequestLimits(
            llm.info.context_length,
            drafter_names(),
            options.max_samples,
            llm.budget,
            llm.info.vocab_size,
            options.strict,
        )
        self.created = int(time.time())
        self.drafters = [name for name in drafter_names() if _needs_no_options(name)]


def _needs_no_options(drafter: str) -> bool:
    try:
        check_drafter(drafter, None)
    except DraftwoodError:
        return False
    return True


def get_state(scope: Scope) -> ServerState:
    """Return the state of the server that handles a request."""
    state: ServerState = scope["app"].state.server
    return state
