"""CORS policy: the origins whose pages may call the API from a browser, and the headers that tell the browser so.

Keys travel in a header and never in a cookie, so that no answer allows credentials.
"""

from collections.abc import Mapping, Sequence

ANY = "*"
MAX_AGE = "600"
"""Seconds that a browser need not ask again; each later change of the origins takes so long to reach it."""
METHODS = "GET, POST, DELETE"
ORIGIN, REQUESTED_METHOD = "origin", "access-control-request-method"
REQUESTED_HEADERS = "access-control-request-headers"


class CorsPolicy:
    """The policy of one frontend process.

    Args:
        origins: one or more that may call, such as ``https://app.example.com``; ``*`` is any.
        routes: beside those below ``/v1/``.
        closed: routes for administrators, which no page of another origin may call.
    """

    def __init__(self, origins: Sequence[str], routes: frozenset[str], closed: frozenset[str]) -> None:
        self._origins, self._routes, self._closed = frozenset(origin.lower() for origin in origins), routes, closed

    def headers(self, path: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Return what an answer has in addition; nothing at a path that is not part of this."""
        if path in self._closed or not (path.startswith("/v1/") or path in self._routes):
            return {}
        origin = headers.get(ORIGIN, "")
        if ANY in self._origins:
            return {"access-control-allow-origin": ANY, "access-control-expose-headers": "*"}
        allowed = {"access-control-allow-origin": origin, "access-control-expose-headers": "*"}
        # A cache must not give one origin's answer to another.
        return {"vary": ORIGIN, **(allowed if origin.lower() in self._origins else {})}

    def preflight(self, method: str, path: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Return the headers that answer a browser's question before its request; None for any other request."""
        if method != "OPTIONS" or REQUESTED_METHOD not in headers:
            return None
        answer = self.headers(path, headers)
        if "access-control-allow-origin" not in answer:
            return None
        asked = headers.get(REQUESTED_HEADERS, "")
        names = {"access-control-allow-headers": asked} if asked.isascii() and asked.isprintable() and asked else {}
        return {
            "access-control-allow-origin": answer["access-control-allow-origin"],
            "access-control-allow-methods": METHODS,
            "access-control-max-age": MAX_AGE,
            "vary": f"{ORIGIN}, {REQUESTED_METHOD}, {REQUESTED_HEADERS}",
            **names,
        }
