"""Frontend peers: requests to the cluster's other frontend processes, signed with its secret (`http.peer_guard`).

And the answer to a frontend that joins late and asks what is known of an engine.
"""

import asyncio
import logging
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from penstock.frontend.http.api_keys import SPAN
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.service import Service, service_of
from penstock.kernel.plurals import counted
from penstock.kernel.values import Target, WorkerId
from penstock.router.status_rows import StatusFinding
from penstock.runtime.cluster_state.peer_signature import signed

log = logging.getLogger("penstock.peers")

T = TypeVar("T")

TIMEOUT = 2.0
"""Seconds that another frontend process has to answer."""


async def from_peers(service: Service, path: str, kind: type[T]) -> list[T]:
    """Return what the other frontend processes of this cluster answer; those that do not are left out.

    Args:
        path: with query, such as ``/admin/status?scope=process``.
        kind: of the JSON answer.
    """
    answers = await by_peer(service, path, kind)
    return [answer for answer in answers.values() if answer is not None]


async def texts_from_peers(service: Service, path: str) -> list[str]:
    """Return the same as text."""
    return [raw.decode() for raw in (await _raw_by_peer(service, path)).values() if raw is not None]


async def raw_from_peers(service: Service, path: str, method: str = "GET") -> list[bytes]:
    """Return the same as bytes. ``method``: other than GET where the path is below `PEERS`."""
    return [raw for raw in (await _raw_by_peer(service, path, method)).values() if raw is not None]


async def to_one_peer(service: Service, path: str, body: bytes) -> bool:
    """Send a body, which the path names by its digest, to the first other frontend that takes it."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as http:
        for peer in service.cluster.peers():
            url = URL(peer.rstrip("/") + path, encoded=True)
            if await _request_peer(http, "POST", url, signed(service.secret, url, "POST"), body) is not None:
                return True
    return False


async def by_peer(service: Service, path: str, kind: type[T]) -> dict[str, T | None]:
    """Return the same by each peer's admin URL; None for those that do not answer."""
    return {url: _decoded_answer(url, raw, kind) for url, raw in (await _raw_by_peer(service, path)).items()}


async def give_kv_blocks(request: web.Request) -> web.Response:
    """GET /peer/kv-blocks/{worker}/{rank}."""
    target = Target(WorkerId(request.match_info["worker"]), int(request.match_info["rank"]))
    blocks = service_of(request).cluster.kv_blocks(target)
    if blocks is None:
        raise rejected(f"not all is known of {quoted(str(target))} here", "worker", code="not_found", status=404)
    return web.Response(body=msgspec.msgpack.encode(blocks))


def findings(service: Service) -> list[StatusFinding]:
    """Return findings for the operator about refused requests."""
    refused = service.gate.peer_guard.refused
    findings = []
    for why, hint in (
        ("wrong secret", "give all processes of the cluster the same PENSTOCK_CLUSTER_SECRET"),
        ("newer", "processes of one cluster run the same release; update this one"),
        ("too old", f"the clocks of the cluster's machines differ by more than {SPAN} s: run a time service"),
    ):
        if refused.get(why):
            text = f"not let in: {counted(refused[why], 'request')} said to be of another frontend: {why}"
            findings.append(StatusFinding("warning", text, hint))
    return findings


def _decoded_answer(url: str, raw: bytes | None, kind: type[T]) -> T | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the answer of the frontend at %s can't be read: %s", url, error)
        return None


async def _raw_by_peer(service: Service, path: str, method: str = "GET") -> dict[str, bytes | None]:
    urls = service.cluster.peers()
    if not urls:
        return {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        wanted = [URL(url.rstrip("/") + path, encoded=True) for url in urls]
        answers = await asyncio.gather(
            *(_request_peer(http, method, url, signed(service.secret, url, method)) for url in wanted)
        )
    return dict(zip(urls, answers, strict=True))


async def _request_peer(
    http: aiohttp.ClientSession, method: str, url: URL, headers: dict[str, str], body: bytes = b""
) -> bytes | None:
    try:
        async with http.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
            if response.status != 200:
                if response.status in (401, 403):
                    log.warning("the frontend at %s does not let us in: another cluster secret", url.origin())
                return None
            return await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None  # a process that is ending must not fail the answer of the others
