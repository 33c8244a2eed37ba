"""The server as an ASGI application: its routes, middleware and error handlers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from draftwood.serve.endpoints import (
    ChatCompletions,
    Completions,
    CountTokens,
    Detokenize,
    Health,
    Messages,
    MetricsReport,
    Models,
    OpenApi,
    Playground,
    Responses,
    Tokenize,
)
from draftwood.serve.errors import ApiError
from draftwood.serve.middleware import ApiKeyMiddleware, RequestMiddleware, WebPageMiddleware
from draftwood.serve.responses import error_response
from draftwood.serve.state import ServerState, get_state

WITH_KEY = [Middleware(ApiKeyMiddleware)]

ROUTES = (
    Route("/v1/chat/completions", ChatCompletions, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/completions", Completions, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/responses", Responses, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/messages", Messages, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/messages/count_tokens", CountTokens, methods=["POST"], middleware=WITH_KEY),
    Route("/tokenize", Tokenize, methods=["POST"], middleware=WITH_KEY),
    Route("/detokenize", Detokenize, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/models", Models, methods=["GET"], middleware=WITH_KEY),
    Route("/v1/models/{name:path}", Models, methods=["GET"], middleware=WITH_KEY),
    Route("/health", Health, methods=["GET"]),
    Route("/openapi.json", OpenApi, methods=["GET"]),
    Route("/metrics", MetricsReport, methods=["GET"], middleware=WITH_KEY),
)
PLAYGROUND = (Route("/", Playground, methods=["GET"]), Route("/playground/{name}", Playground, methods=["GET"]))
PATHS = [route.path_format for route in ROUTES]


def create_app(state: ServerState) -> Starlette:
    """The application starts and stops the runner of ``state``."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.runner.start(asyncio.get_running_loop().call_soon_threadsafe)
        with suppress(asyncio.CancelledError):  # a second Ctrl-C
            yield
            await asyncio.to_thread(state.runner.close)

    app = Starlette(
        routes=ROUTES + PLAYGROUND if state.options.playground else ROUTES,
        middleware=[
            Middleware(RequestMiddleware, state=state, paths=["/", *PATHS]),
            Middleware(WebPageMiddleware, state=state),
        ],
        exception_handlers={ApiError: handle_api_error, HTTPException: handle_routing_error},
        lifespan=lifespan,
    )
    app.state.server = state
    return app


async def handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, path=request.scope["path"])


async def handle_routing_error(request: Request, error: Exception) -> Response:
    """Respond to unknown paths, unsupported methods, and preflight requests of browsers."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.method
    if method == "OPTIONS" and get_state(request.scope).options.allow_origin:
        return Response(status_code=204)
    if error.status_code == 404:
        return error_response(ApiError(f"Unknown path {path}", allowed=PATHS, code="unknown_url"), path=path)
    methods = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
    what = f"{path} does not support this method"
    return error_response(
        ApiError(what, got=method, allowed=methods, code="method_not_supported"), {"allow": methods}, path
    )
