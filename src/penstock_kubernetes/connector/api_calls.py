"""Calls to the API server: each has a deadline, and each failure is a sentence with its consequence."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import httpx2
from lightkube import ApiError, AsyncClient

from penstock_kubernetes.api.rights import is_allowed
from penstock_kubernetes.connector.scale_target import (
    ApiRight,
    OutcomeUnknown,
    RightMissing,
    TargetError,
    WriteConflict,
)

T = TypeVar("T")

CALL_TIMEOUT = 10.0
"""Seconds that one call may take: an API server that needs longer is overloaded, and the next tick comes soon."""
NOT_FOUND = 404


async def call(what: str, request: Callable[[], Awaitable[T]]) -> T:
    """Return the answer to one call.

    Args:
        what: the call in words, such as "read Deployment vllm".
    Raises:
        TargetError: it failed; its class says what is known of the object now.
    """
    try:
        async with asyncio.timeout(CALL_TIMEOUT):
            return await request()
    except ApiError as error:
        text = f"the API server did not {what}: {error.status.message or error.status.reason}"
        match error.status.code or 0:
            case 401 | 403:
                raise RightMissing(text) from error
            case 409:
                raise WriteConflict(text) from error
            case code if code >= 500:
                raise OutcomeUnknown(text) from error
            case _:
                raise TargetError(text) from error
    except httpx2.ConnectError as error:
        raise TargetError(f"the API server can't be reached to {what}: {error}") from error
    except (httpx2.HTTPError, OSError, TimeoutError) as error:
        raise OutcomeUnknown(f"no answer to: {what}: {str(error) or type(error).__name__}") from error


def absent(error: TargetError) -> bool:
    """Return whether an error says that there is no such object or resource."""
    cause = error.__cause__
    return isinstance(cause, ApiError) and cause.status.code == NOT_FOUND


async def missing_rights(client: AsyncClient, rights: Sequence[ApiRight]) -> list[ApiRight]:
    """Return those of the rights that our account does not have in the client's namespace.

    Raises:
        TargetError: the API server does not answer the question.
    """

    async def allowed(right: ApiRight) -> bool:
        review = partial(is_allowed, client, right.verb, right.group, right.resource, right.name)
        return await call(f"review whether we may {right}", review)

    answers = await asyncio.gather(*(allowed(right) for right in rights))
    return [right for right, ok in zip(rights, answers, strict=True) if not ok]
