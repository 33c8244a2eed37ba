"""The application behind a port, until somebody ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from draftwood.errors import MissingExtraError, OptionError
from draftwood.llm import LLM
from draftwood.serve.app import App, ServerOptions

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 512
GRACE_SECONDS = 10  # that running answers have when the server is told to end


def check_installed() -> None:
    """Before a model is loaded for nothing."""
    try:
        import uvicorn  # noqa: F401 - an extra
    except ImportError as error:
        raise MissingExtraError("draftwood serve", "uvicorn", "serve") from error


def listen(host: str, port: int) -> socket.socket:
    """A port of ours; 0: any that is free. Taken before the model is loaded, so that nobody waits for a refusal."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise OptionError(
            f"The server cannot listen at {host}, port {port}",
            got=getattr(error, "strerror", None) or error,
            next_step="Name another --port (0: any that is free), or another --host.",
        ) from error
    listener.listen(BACKLOG)
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def run(llm: LLM, options: ServerOptions, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serves until a signal ends it; running answers are finished first, if they do not take long."""
    make_server(llm, options, ready).run(sockets=[listener])


def make_server(llm: LLM, options: ServerOptions, ready: Callable[[], None]) -> uvicorn.Server:
    """``ready`` is called once clients can come."""
    check_installed()
    import uvicorn

    app = App(llm, options)

    class Server(uvicorn.Server):
        def run(self, sockets: list[socket.socket] | None = None) -> None:
            try:
                super().run(sockets)
            finally:
                app.close()  # after a second Ctrl-C nobody else has

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """They have ended the server. Sent once more, as usual, they would end the program before it has kept what
            was learned."""
            with super().capture_signals():
                yield
                self._captured_signals.clear()

    return Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
