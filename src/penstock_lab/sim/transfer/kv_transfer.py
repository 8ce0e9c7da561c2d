"""KV transfer between simulated engines over HTTP: the holder answers when the bytes would have arrived.

``POST /kv_pull {request_id, tokens, waits, target}`` answers 200 when the bytes begin to move, its body ends when the
last one has crossed the holder's link out; then the blocks are released. 404: the KV is not held here, or not any more.
With ``waits`` the holder waits for a prefill that is still running. ``POST /kv_release {request_id}`` reports that no
engine will pull. The puller simulates its own link as well; the KV is there at the later time of both.
"""

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import web

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.http_session import HttpSession
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, PullKv, SubmitRequest
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_metrics import SimMetrics
from penstock_lab.sim.transfer.live_links import HERE, LiveLinks
from penstock_lab.sim.transfer.transfer_params import KvSource

WAIT_MAX = 30.0
"""Seconds that a puller waits for a prefill whose two legs were sent at once."""
CONNECT_MAX = 5.0
"""Seconds for a connection to another engine."""
UNWANTED_MAX = 1024
"""Releases that are remembered for prefills that have not come yet; the oldest is forgotten."""


class KvOffer:
    """The KV of one prefill: ``decided``: set once it is held, or never will be. ``id``: its request in the engine."""

    __slots__ = ("decided", "id", "retained", "unwanted")

    def __init__(self) -> None:
        self.id: str | None = None
        self.decided = asyncio.Event()
        self.retained = False
        self.unwanted = False


class KvHolder(Protocol):
    """The engine whose KV is transferred: `penstock_lab.sim.live_engine.LiveEngine`."""

    settings: SimSettings
    engine: Engine
    metrics: SimMetrics

    def release(self, id: str) -> None:
        """Release the KV that is held of a request."""
        ...

    def pulled(self, id: str, ok: bool) -> None:
        """The KV of a request has come, or will not."""
        ...


class KvTransferServer:
    """The KV that one live engine holds for others, and pulls from them.

    ``host`` and ``port``: the address of this engine.
    """

    def __init__(self, live: KvHolder) -> None:
        transfer = live.settings.transfer
        self.host, self.port = "127.0.0.1", 0
        self._live = live
        self._bytes = transfer.kv_bytes_per_token
        self._patience = transfer.hold_timeout
        self._wire = LiveLinks(transfer)
        # Every pull has a connection of its own while it lasts: the link bounds pulls, not the client.
        self._http = HttpSession(lambda: aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        self._offers: OrderedDict[str, KvOffer] = OrderedDict()
        self._mine: dict[str, list[str]] = {}
        """Prefill request -> keys of its offer."""
        self._sources: dict[str, KvSource] = {}
        """Decode request -> where its KV is; until that has come, or was given up."""
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._notes = BackgroundTasks()

    @property
    def name(self) -> str:
        """The name by which other engines know this one."""
        return f"{self.host}:{self.port}"

    async def close(self) -> None:
        """Cancel transfers that are under way."""
        await cancel_all([*self._pulls.values(), *self._notes])
        self._wire.close()
        await self._http.close()

    # --- reports of the engine --------------------------------------------------------------------------------------

    def expect(self, submit: SubmitRequest, key: str | None, source: KvSource | None) -> None:
        """Record a request that is about to be submitted, and has a part in a hand-off."""
        if source is not None:
            self._sources[submit.id] = source
            return
        keys: list[str] = [submit.id]
        if key is not None:
            keys.append(key)
        offer = self._offers.get(keys[-1])
        if offer is None or offer.decided.is_set():
            offer = KvOffer()
        offer.id = submit.id
        self._sweep()
        for each in keys:
            self._offers[each] = offer
        self._mine[submit.id] = keys

    def pull(self, wanted: PullKv) -> None:
        """Pull the KV that the engine requests."""
        self._pulls[wanted.id] = asyncio.create_task(self._pull(wanted, self._sources[wanted.id]))

    def ended(self, id: str, finished: EngineFinished | None) -> None:
        """Record the end of a request; None where the engine refused it."""
        keys = self._mine.pop(id, None)
        if keys is not None:
            offer = self._offers[keys[0]]
            offer.retained = finished is not None and finished.blocks_retained > 0
            offer.decided.set()
            if offer.retained and offer.unwanted:
                self._release(offer)
        pull = self._pulls.pop(id, None)
        if pull is not None:
            pull.cancel()
        source = self._sources.pop(id, None)
        if source is not None:
            # It ended before its KV was here: as vLLM, notify the holder, so that no KV is stranded there.
            self._note(source)

    # --- requests of other engines ----------------------------------------------------------------------------------

    async def serve(self, request: web.Request, body: JsonObject) -> web.StreamResponse:
        """Answer ``/kv_pull``."""
        key, tokens = _key_of_request(body), body.get("tokens")
        if type(tokens) is not int or tokens < 0:
            raise ClientError("tokens must be a whole number, 0 or more.", param="tokens")
        offer = await self._offered(key, body.get("waits") is True)
        if offer is None or offer.id is None or not self._live.engine.holds(offer.id):
            raise ClientError(f"No KV is held of {key}.", status=404, code="NotFoundError", param="request_id")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b" ")  # the headers go with the first byte: the puller counts from here
        await self._wire.cross(HERE, str(body.get("target")), tokens * self._bytes)
        retained = self._live.engine.holds(offer.id) > 0
        self._release(offer)
        await response.write(msgspec.json.encode({"ok": retained}))
        await response.write_eof()
        return response

    def give_up(self, body: JsonObject) -> None:
        """Answer ``/kv_release``: no engine will pull this KV."""
        key = _key_of_request(body)
        offer = self._offers.get(key)
        if offer is None:
            if body.get("waits") is True:
                self._offers[key] = offer = KvOffer()
                offer.unwanted = True
                self._sweep()
            return
        offer.unwanted = True
        self._release(offer)

    async def _offered(self, key: str, waits: bool) -> KvOffer | None:
        offer = self._offers.get(key)
        if not waits:
            return offer
        if offer is None:
            offer = self._offers[key] = KvOffer()
        try:
            await asyncio.wait_for(offer.decided.wait(), WAIT_MAX)
        except TimeoutError:
            return None
        finally:
            if offer.id is None and self._offers.get(key) is offer:
                del self._offers[key]
        return offer

    def _release(self, offer: KvOffer) -> None:
        if offer.retained and offer.id is not None:
            offer.retained = False
            self._live.release(offer.id)

    def _sweep(self) -> None:
        """Forget offers that are over, oldest first; held ones go in the order in which they came."""
        offers = self._offers
        while offers:
            key, offer = next(iter(offers.items()))
            over = offer.decided.is_set() and not (offer.id and self._live.engine.holds(offer.id))
            if not over and not (offer.unwanted and offer.id is None and len(offers) > UNWANTED_MAX):
                return
            del offers[key]

    # --- pulls of this engine ---------------------------------------------------------------------------------------

    async def _pull(self, wanted: PullKv, source: KvSource) -> None:
        ok = True
        if wanted.tokens:
            try:
                began = await self._bring(wanted.tokens, source)
                self._live.metrics.transferred(wanted.tokens * self._bytes, time.monotonic() - began)
            except (aiohttp.ClientError, TimeoutError, OSError, _KvLost):
                ok = False
                self._live.metrics.transfer_failed()
        else:
            self._note(source)  # all of it is here already
        self._sources.pop(wanted.id, None)
        self._pulls.pop(wanted.id, None)
        self._live.pulled(wanted.id, ok)

    async def _bring(self, tokens: int, source: KvSource) -> float:
        """Pull so many tokens' KV; returns when its first byte came, in seconds of the monotonic clock."""
        body = {"request_id": source.key, "tokens": tokens, "waits": source.waits, "target": self.name}
        limit = aiohttp.ClientTimeout(
            total=self._patience + (WAIT_MAX if source.waits else 0.0), sock_connect=CONNECT_MAX
        )
        async with self._http.session.post(f"http://{source.name}/kv_pull", json=body, timeout=limit) as answer:
            if answer.status != 200:
                raise _KvLost
            began = time.monotonic()
            crossing = asyncio.create_task(self._wire.cross(source.name, HERE, tokens * self._bytes))
            try:
                status = msgspec.json.decode(await answer.read())
                await crossing
            except msgspec.DecodeError as error:
                raise _KvLost from error
            finally:
                crossing.cancel()
        if status != {"ok": True}:
            raise _KvLost
        return began

    def _note(self, source: KvSource) -> None:
        self._notes.spawn(self._tell(source))

    async def _tell(self, source: KvSource) -> None:
        body = {"request_id": source.key, "waits": source.waits}
        limit = aiohttp.ClientTimeout(total=CONNECT_MAX)
        try:
            async with self._http.session.post(f"http://{source.name}/kv_release", json=body, timeout=limit):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            # A holder that can't be notified releases the KV by itself after its hold_timeout.
            self._live.metrics.notification_failed()


class _KvLost(Exception):
    """The holder does not have the KV."""


def _key_of_request(body: JsonObject) -> str:
    key = body.get("request_id")
    if not isinstance(key, str):
        raise ClientError("request_id must be a text.", param="request_id")
    return key
