"""Response reach: stored responses of the whole cluster, whichever frontend process holds them."""

import asyncio
import hashlib
import logging
import re
from urllib.parse import quote

import msgspec
from aiohttp import web

from penstock.frontend.admin.frontend_peers import raw_from_peers, to_one_peer
from penstock.frontend.http.api_keys import PEERS
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import read_body
from penstock.frontend.response_store import HeldResponse, StoredResponse, copied
from penstock.frontend.service import Service, service_of

log = logging.getLogger("penstock.frontend")

PEER_RESPONSES = PEERS + "responses"
PEER_RESPONSE = PEER_RESPONSES + "/{id}"
HAND_OVER_TIMEOUT = 10.0
"""Seconds that an ending process takes to hand over what it holds: a supervisor waits for it."""
PIECE = 4 << 20
"""Bytes of responses that go in one request, unless one alone has more."""
_ID = re.compile(r"resp_[0-9a-f]{32}\Z")


async def find_response(service: Service, id: str, owner: str) -> StoredResponse | None:
    """Return a response of this owner: this process's own, or a copy of another's, which has no task.

    Other processes come before shared memory: only they know of one that is being made whether it still is.
    """
    if not _ID.match(id):
        return None  # nobody has made such an id, so nobody is asked
    stored = service.responses.get(id, owner)
    if stored is not None:
        return stored
    for raw in await raw_from_peers(service, _at_peers(id, owner)):
        return copied(msgspec.msgpack.decode(raw, type=HeldResponse))
    return await service.responses.from_shared(id, owner)


async def forget_response(service: Service, id: str, owner: str) -> bool:
    """Forget a response wherever it is; one that is being made ends. Return whether there was one."""
    if not _ID.match(id):
        return False
    here = await service.responses.erase(id, owner)
    return bool(await raw_from_peers(service, _at_peers(id, owner), "DELETE")) or here


async def end_response(service: Service, stored: StoredResponse) -> bytes:
    """End a background response wherever it is made; return what it is then."""
    if service.responses.get(stored.id, stored.owner) is not None:
        return end_here(service, stored)
    ended = await raw_from_peers(service, _at_peers(stored.id, stored.owner), "POST")
    return ended[0] if ended else stored.body


def end_here(service: Service, stored: StoredResponse) -> bytes:
    """End a background response of this process; one that has ended stays as it is."""
    response = msgspec.json.decode(stored.body)
    if stored.task is None or response["status"] != "in_progress":
        return stored.body
    stored.task.cancel()
    body = msgspec.json.encode({**response, "status": "cancelled"})
    service.responses.put(StoredResponse(stored.id, stored.owner, stored.session, body, stored.items))
    return body


async def give_response(request: web.Request) -> web.Response:
    """GET, DELETE and POST of a response of this process, by another frontend: read it, forget it, end it."""
    service, id, owner = service_of(request), request.match_info["id"], request.query.get("owner", "")
    stored = service.responses.get(id, owner)
    if stored is None:
        raise rejected(f"response {quoted(id)} is not held by this process", "id", code="not_found", status=404)
    if request.method == "DELETE":
        await service.responses.erase(id, owner)
        return web.Response()
    if request.method == "POST":
        return web.Response(body=end_here(service, stored))
    return web.Response(body=msgspec.msgpack.encode(stored.for_peers()))


async def hand_over(service: Service) -> None:
    """Give all responses of this process, which ends, to another frontend; without one they end with it."""
    held = service.responses.all_for_peers()
    if not held or not service.cluster.peers():
        return
    pieces: list[list[HeldResponse]] = [[]]
    for response in held:
        if sum(len(r.body) + len(r.items) for r in pieces[-1]) > PIECE:
            pieces.append([])
        pieces[-1].append(response)
    taken = 0
    try:
        async with asyncio.timeout(HAND_OVER_TIMEOUT):
            for piece in pieces:
                data = msgspec.msgpack.encode(piece)
                path = f"{PEER_RESPONSES}?digest={_body_digest(data)}"
                taken += len(piece) if await to_one_peer(service, path, data) else 0
    except TimeoutError:
        log.warning("no frontend takes the stored responses in time")
    log.info("handed over %d of %d stored responses", taken, len(held))


async def take_responses(request: web.Request) -> web.Response:
    """POST of the responses of another frontend, which ends."""
    service = service_of(request)
    if service.gate.draining or service.gate.retiring:
        raise rejected("this process ends, too", code="draining", status=503)
    data = await read_body(request)
    # The signature of a peer covers the query, and by it the body.
    if request.query.get("digest") != _body_digest(data):
        raise rejected("the body is not what was signed", "digest")
    for held in msgspec.msgpack.decode(data, type=list[HeldResponse]):
        service.responses.put(copied(held))
    return web.Response()


def _body_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _at_peers(id: str, owner: str) -> str:
    return f"{PEER_RESPONSE.format(id=id)}?owner={quote(owner, safe='')}"
