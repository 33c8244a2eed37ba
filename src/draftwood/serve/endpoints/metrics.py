"""GET /metrics: counters for Prometheus."""

from prometheus_client.exposition import choose_encoder
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood.serve.state import get_state


class MetricsReport(HTTPEndpoint):
    async def get(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(get_state(self.scope).metrics.registry), headers={"content-type": content_type})
