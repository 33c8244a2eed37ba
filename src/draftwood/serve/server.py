"""Binds the application to a port and runs it until a signal stops it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from draftwood.errors import OptionError
from draftwood.llm import LLM
from draftwood.serve.app import create_app
from draftwood.serve.connections import BACKLOG, LimitedConnection
from draftwood.serve.logs import limit_repeats
from draftwood.serve.state import ServerOptions, ServerState

GRACE_SECONDS = 10  # time for running requests to finish at shutdown


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes any free port. Call it before loading the model, to fail early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise OptionError(
            f"Cannot listen on {host}, port {port}",
            got=getattr(error, "strerror", None) or error,
            next_step="Choose another --port (0: any free port) or another --host.",
        ) from error
    listener.listen(BACKLOG)
    return listener


def server_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def create_server(llm: LLM, options: ServerOptions, on_ready: Callable[[], None]) -> uvicorn.Server:
    """Its ``run(sockets=[...])`` serves until a signal arrives. Running requests then have ``GRACE_SECONDS`` to finish.
    ``on_ready`` is called as soon as the server accepts requests."""
    state = ServerState(llm, options)

    class Connection(LimitedConnection):
        limits = state.connections

    class Server(uvicorn.Server):
        def run(self, sockets: list[socket.socket] | None = None) -> None:
            try:
                with limit_repeats():
                    super().run(sockets)
            finally:
                state.runner.close()  # a second Ctrl-C skips the shutdown of the application
                state.request_log.close()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Drop the signals that stopped the server. Uvicorn raises them again, which would end the process before
            the drafter's memory is saved."""
            with super().capture_signals():
                yield
                self._captured_signals.clear()

    config = uvicorn.Config(
        create_app(state),
        http=Connection,
        ws="none",
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,  # anybody on this machine could claim the address of another client
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return Server(config)
