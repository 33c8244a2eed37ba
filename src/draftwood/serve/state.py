"""Server options, and the objects that all endpoints share."""

import time
from dataclasses import dataclass

from starlette.types import Scope

from draftwood.llm import LLM
from draftwood.serve.metrics import Metrics
from draftwood.serve.runner import Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    names: tuple[str, ...]  # model names exposed by the API
    api_key: str | None = None  # required from clients; None: no key
    allow_origin: str | None = None  # origin of web pages that may call the API; "*": any
    max_samples: int = 256  # running and queued samples; requests beyond it get status 503


class ServerState:
    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.runner = Runner(llm, options.max_samples)
        self.metrics = Metrics(lambda: self.runner.num_open)
        self.created = int(time.time())


def get_state(scope: Scope) -> ServerState:
    """Return the state of the server that handles a request."""
    state: ServerState = scope["app"].state.server
    return state
