"""List page: the part of a list that a request asks for with ``limit`` and ``after``, as OpenAI's lists have them."""

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from penstock.frontend.http.error_responses import quoted, rejected

T = TypeVar("T")


def page_of(request: web.Request, every: list[T], most: int, id_of: Callable[[T], str]) -> tuple[list[T], bool]:
    """Return the page, and whether there is more; ``most``: its largest size.

    Raises:
        ClientError: 400: one of the two is wrong.
    """
    limit = request.query.get("limit", "20" if most <= 100 else str(most))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= most:
        raise rejected(f"limit must be a number from 1 to {most}", "limit")
    after = request.query.get("after")
    if after is not None:
        at = next((number for number, entry in enumerate(every) if id_of(entry) == after), None)
        if at is None:
            raise rejected(f"after must name one of the list, not {quoted(after)}", "after")
        every = every[at + 1 :]
    return every[: int(limit)], len(every) > int(limit)
