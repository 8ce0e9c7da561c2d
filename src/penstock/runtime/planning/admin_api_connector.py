"""Admin API connector: scales a cluster for a planner that runs elsewhere, through a frontend's admin routes."""

import ssl
from collections.abc import Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from penstock.adapters.http_session import within
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import Pool
from penstock.planner.plugins.proposals import Flip, Reason
from penstock.runtime.cluster_state.desired_state import PoolStatus
from penstock.runtime.cluster_state.fleet_api import DesiredState, FlipBody, Flipped, PoolsScaled, Problem, ScaleBody
from penstock.runtime.planning.desired_state_connector import flipped, pool_of_status, refusals

T = TypeVar("T")

TIMEOUT = 10.0


class AdminRefused(PenstockError):
    """The cluster does not answer, or refuses."""


class AdminApiConnector:
    """A `penstock.adapters.connectors.scale_connector.ScaleConnector` over a cluster's frontend.

    Args:
        url: of the frontend, or of its admin port.
        key: of an administrator; None where callers of this machine need none.
    """

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._pools: dict[str, PoolStatus] = {}
        self._http = within(TIMEOUT, tls, headers)

    async def look(self) -> Mapping[str, Pool]:
        answer = await self._call("GET", "/admin/desired", None, DesiredState)
        self._pools = {
            each.name: PoolStatus(pool=each, kind=each.kind, revision=each.revision) for each in answer.pools
        }
        return {name: pool_of_status(report, None) for name, report in self._pools.items()}

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], reasons: Sequence[Reason]
    ) -> dict[str, str]:
        problems = refusals(self._pools, targets)
        for name, replicas in targets.items():
            if name not in problems:
                try:
                    await self._call("POST", "/admin/scale", ScaleBody({name: replicas}), PoolsScaled)
                except PenstockError as error:
                    problems[name] = str(error)
        for worker, role in flipped(self._pools, flips):
            try:
                await self._call("POST", "/admin/flip", FlipBody(worker, role), Flipped)
            except PenstockError as error:
                problems[worker] = str(error)
        return problems

    def describe(self) -> str:
        return f"the admin routes of {self._url}"

    async def close(self) -> None:
        await self._http.close()

    async def _call(self, method: str, path: str, body: msgspec.Struct | None, kind: type[T]) -> T:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._http.session.request(method, self._url + path, data=data, allow_redirects=False) as answer:
                content = await answer.read()
                if answer.status == 200:
                    return msgspec.json.decode(content, type=kind)
                message = msgspec.json.decode(content, type=Problem).error.message
                raise AdminRefused(f"{self._url}{path} answers {answer.status}: {message}")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            raise AdminRefused(f"{self._url}{path} does not answer: {str(error) or type(error).__name__}") from error
