"""Page routes: serve the operator's page, a few files without anything from outside."""

from functools import cache

from aiohttp import web

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.page.page_file import BROWSER

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    # No inline script and no inline style: the name of a model or a worker can never become either.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def home(request: web.Request) -> web.Response:
    """GET /: redirect to the page."""
    return web.Response(status=302, headers={"location": "/ui"})


async def page(request: web.Request) -> web.Response:
    """GET /ui"""
    return _file_answer("index.html")


async def file(request: web.Request) -> web.Response:
    """GET /ui/{file}: a script, the style or the icon of the page."""
    name = request.match_info["file"]
    if name not in _browser_files():
        raise rejected(f"the page has no file {quoted(name)}", code="not_found", status=404)
    return _file_answer(name)


def _file_answer(name: str) -> web.Response:
    kind = _KINDS[name[name.rindex(".") :]]
    return web.Response(body=_browser_files()[name], content_type=kind, charset="utf-8", headers=_HEADERS)


@cache
def _browser_files() -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in BROWSER.iterdir() if entry.name.endswith(tuple(_KINDS))}
