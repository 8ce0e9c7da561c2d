"""What does a person see in a browser? One self-contained page that asks /admin/status every two seconds."""

from functools import cache
from importlib.resources import files

from aiohttp import web

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


async def page(request: web.Request) -> web.Response:
    """GET /ui"""
    return web.Response(
        body=_html(),
        content_type="text/html",
        charset="utf-8",
        headers={
            "content-security-policy": _POLICY + "; img-src data:; frame-ancestors 'none'; base-uri 'none'",
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        },
    )


@cache
def _html() -> bytes:
    return files("penstock.frontend").joinpath("page.html").read_bytes()
