"""GET /metrics: counters for Prometheus."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from draftwood.serve.endpoints.base import Endpoint


class MetricsReport(Endpoint):
    async def get(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.server.metrics.registry), headers={"content-type": content_type})
