"""The dashboard: one page, its style and its script, as they are in this folder. No build, no other hosts.

The page has nothing to hide and needs no key; what it shows it asks the API for, with the key that its user gives it.
"""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER: Final = Path(__file__).parent
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/app.js": ("app.js", "text/javascript"),
}
#: Nothing from elsewhere, nothing inline, not in somebody else's frame.
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def dashboard_routes() -> list[Route]:
    """The page and what it needs; read once."""
    return [_route(path, (_FOLDER / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, body: bytes, media_type: str) -> Route:
    async def answer(request: Request) -> Response:
        return Response(body, 200, _HEADERS, media_type)

    return Route(path, answer, methods=["GET"])
