"""The server as an ASGI application: its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from draftwood.serve.endpoints import ChatCompletions, Completions, Health, MetricsReport, Models
from draftwood.serve.errors import ApiError, MethodError, UnknownPathError
from draftwood.serve.middleware import ApiKeyMiddleware, CorsMiddleware, ErrorMiddleware, MetricsMiddleware
from draftwood.serve.responses import error_response
from draftwood.serve.state import ServerState

WITH_KEY = [Middleware(ApiKeyMiddleware)]

ROUTES = (
    Route("/v1/chat/completions", ChatCompletions, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/completions", Completions, methods=["POST"], middleware=WITH_KEY),
    Route("/v1/models", Models, methods=["GET"], middleware=WITH_KEY),
    Route("/v1/models/{name:path}", Models, methods=["GET"], middleware=WITH_KEY),
    Route("/health", Health, methods=["GET"]),
    Route("/metrics", MetricsReport, methods=["GET"], middleware=WITH_KEY),
)
PATHS = [route.path for route in ROUTES]


def create_app(state: ServerState) -> Starlette:
    """The application starts and stops the runner of ``state``."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.runner.start()
        with suppress(asyncio.CancelledError):  # a second Ctrl-C
            yield
            await asyncio.to_thread(state.runner.close)

    origin = state.options.allow_origin
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(MetricsMiddleware, metrics=state.metrics, paths=PATHS),
            *([Middleware(CorsMiddleware, allow_origin=origin)] if origin else []),
            Middleware(ErrorMiddleware),
        ],
        exception_handlers={ApiError: handle_api_error, HTTPException: handle_routing_error},
        lifespan=lifespan,
    )
    app.state.server = state
    return app


async def handle_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def handle_routing_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as errors of the API."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code != MethodError.status:
        return error_response(UnknownPathError(f"Unknown path {path}", allowed=PATHS))
    methods = sorted((error.headers or {})["Allow"].split(", "))
    refused = MethodError(f"{path} does not accept this method", got=request.method, allowed=methods)
    return error_response(refused, {"allow": ", ".join(methods)})
