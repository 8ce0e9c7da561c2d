"""Live network links of one simulated engine: the time that its KV transfers take, in real time."""

import asyncio
import itertools
import time

from penstock.kernel.machine import Event, Nanos, Wake, Woken
from penstock_lab.engine.network_links import CancelTransfer, NetworkLinks, StartTransfer, Transferred
from penstock_lab.engine.settings import TransferSettings

HERE = "here"


class LiveLinks:
    """The links of one engine: its own side of every transfer."""

    def __init__(self, settings: TransferSettings) -> None:
        self._links = NetworkLinks(settings.bandwidth, settings.latency)
        self._loop = asyncio.get_running_loop()
        self._origin = time.monotonic_ns()
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def cross(self, source: str, target: str, size: int) -> None:
        """Return when so many bytes would have crossed; a cancelled wait takes them off the link."""
        id = str(next(self._numbers))
        over = self._waiting[id] = self._loop.create_future()
        self._handle(StartTransfer(id=id, source=source, target=target, size=size))
        try:
            await over
        finally:
            if self._waiting.pop(id, None) is not None:
                self._handle(CancelTransfer(id=id))

    def close(self) -> None:
        """Stop the timer; nothing arrives any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now(self) -> Nanos:
        return time.monotonic_ns() - self._origin

    def _handle(self, event: Event) -> None:
        now = self._now()
        for effect in self._links.handle(now, event):
            if isinstance(effect, Wake):
                self.close()
                self._timer = self._loop.call_later(max(0, effect.at - now) / 1e9, self._handle, Woken())
            elif isinstance(effect, Transferred):
                over = self._waiting.pop(effect.id, None)
                if over is not None and not over.done():
                    over.set_result(None)
