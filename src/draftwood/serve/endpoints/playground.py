"""GET / and /playground/NAME: a page to try the model and to watch its cycles. It needs no other host."""

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood.serve.errors import ApiError

PAGE = "index.html"
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # kept by browsers, and asked for with its tag each time
    "vary": "accept-encoding",
}


class StaticFile(NamedTuple):
    content: bytes
    compressed: bytes
    kind: str
    tag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """All files of the page by name. Requests choose among these names and never reach the file system."""
    found = {}
    for file in files("draftwood.serve").joinpath("playground").iterdir():
        suffix = f".{file.name.rpartition('.')[2]}"
        if suffix in KINDS:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[file.name] = StaticFile(content, gzip.compress(content, mtime=0), KINDS[suffix], tag)
    return found


class Playground(HTTPEndpoint):
    async def get(self, request: Request) -> Response:
        name = request.path_params.get("name", PAGE)
        file = static_files().get(name)
        if file is None:
            raise ApiError(f"Unknown path {request.url.path}", code="unknown_url")
        headers = {**HEADERS, "etag": file.tag, "content-type": f"{file.kind}; charset=utf-8"}
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(file.content, headers=headers)
