"""Store watch: follows a prefix for ever; frozen while the store can't be read, reconciled after that."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from penstock.adapters.seams import Store, StoreUnavailable

RETRY = 1.0
"""Seconds between tries to read a store that can't be read."""


async def follow(
    store: Store,
    prefix: str,
    *,
    known: Callable[[], Iterable[str]],
    put: Callable[[str, bytes], Awaitable[None]],
    deleted: Callable[[str], Awaitable[None]],
    frozen: Callable[[StoreUnavailable | None], None],
    read: Callable[[], None] = lambda: None,
) -> None:
    """Watch a prefix until cancelled.

    Args:
        known: the keys that count as alive; those that ended during an outage are then ``deleted``.
        put: called with each key and its value, also unchanged ones.
        deleted: called with each key that went away.
        frozen: called with the error while the store can't be read, and with None whenever it can.
        read: called whenever all reported changes have been passed on.
    """
    while True:
        try:
            first = True
            async for changes in store.watch(prefix):
                frozen(None)
                if first:  # the first batch is everything that is alive
                    alive = {change.key for change in changes if change.value is not None}
                    for key in [key for key in known() if key not in alive]:
                        await deleted(key)
                    first = False
                for change in changes:
                    if change.value is None:
                        await deleted(change.key)
                    else:
                        await put(change.key, change.value)
                read()
        except StoreUnavailable as error:
            frozen(error)
        await asyncio.sleep(RETRY)
