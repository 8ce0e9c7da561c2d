"""The routes that change a cluster: what makes sense becomes a wish in the store, everything else is told why not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock.kernel.values import Pool, Replica
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    DRAINS,
    POOLS,
    RESTART,
    SETTINGS,
    DrainSpec,
    PoolSpec,
    PoolStatus,
    RestartSpec,
    SettingSpec,
    decode,
    put,
)
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from tests.frontend.stand import Keep, Stand, stand


class Operated:
    """A stand whose frontend stands beside a supervisor's reports."""

    def __init__(self, found: Stand, space: MemorySpace) -> None:
        self.stand = found
        self.space = space
        self.store = MemoryStore(space)
        self.changes = Keep()

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        async with self.stand.http.post(path, json=body, **more) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.stand.http.get(path) as answer:
            return answer.status, await answer.json()

    async def report(
        self, pool: str, *workers: str, kind: str = "process", limit: int | None = 8, gpus: int = 0
    ) -> None:
        replicas = tuple(Replica(id=name, state="ready", gpus=tuple(range(gpus))) for name in workers)
        made = Pool(model="m", desired=len(workers), replicas=replicas, limit=limit)
        await put(self.store, POOLS + pool, PoolStatus(pool=made, kind=kind))  # type: ignore[arg-type]

    async def wish(self, key: str, kind: type[Any]) -> Any:
        raw = (await self.store.list(key)).get(key)
        return None if raw is None else decode(kind, raw)

    @property
    def lines(self) -> list[tuple[Any, ...]]:
        return [(line.key, line.old, line.new, line.by) for line in self.changes.kept]


@asynccontextmanager
async def operated(frontend: FrontendSettings | None = None) -> AsyncIterator[Operated]:
    async with stand(frontend=frontend) as found:
        space = MemorySpace()
        made = Operated(found, space)
        node: Any = found.service.cluster._node  # type: ignore[attr-defined]
        node.store = MemoryStore(space)
        node.tuning = SimpleNamespace(started=found.service.settings)
        found.service.changes = made.changes
        await made.report("main", "main-0", "main-1")
        await made.report("there", "there-0", kind="urls", limit=None)
        for name in ("frontend-0-11", "frontend-1-12"):
            await made.store.put(FRONTENDS + name, b"{}")
        yield made


async def test_scaling_is_wished_for_and_written_down():
    async with operated() as o:
        status, body = await o.post("/admin/scale", {"pools": {"main": 5}})
        assert status == 200 and (body["pools"]["main"]["was"], body["pools"]["main"]["wanted"]) == (2, 5)
        wish = await o.wish(DESIRED + "main", PoolSpec)
        assert (wish.replicas, wish.by, wish.revision) == (5, "local", body["pools"]["main"]["revision"])
        assert o.lines == [("scale main", 2, 5, "local")]
        status, found = await o.get("/admin/desired")
        assert [(pool["name"], pool["ready"]) for pool in found["pools"]] == [("main", 2), ("there", 1)]


async def test_a_scaling_ends_the_drains_of_its_pool_alone():
    async with operated() as o:
        for worker in ("main-1", "there-0"):
            await o.post("/admin/drain", {"name": worker})
        await o.post("/admin/scale", {"pools": {"main": 2}})
        assert await o.wish(DRAINS + "main-1", DrainSpec) is None
        assert await o.wish(DRAINS + "there-0", DrainSpec) is not None


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"pools": {"nope": 1}}, 404, "there is no pool 'nope'; pools: main, there"),
        ({"pools": {"main": -1}}, 400, "takes 0 to 8 replicas, not -1"),
        ({"pools": {"main": 9}}, 400, "takes 0 to 8 replicas, not 9"),
        ({"pools": {"there": 2}}, 400, "can't be scaled; 'penstock drain there-0'"),
        ({"pools": {"main": 3, "nope": 1}}, 404, "nope"),
        ({"pools": {}}, 400, "names no pool"),
        ({"pools": {"main": "many"}}, 400, "does not fit"),
        ({"pols": {"main": 1}}, 400, "pols"),
        ([], 400, "does not fit"),
    ],
)
async def test_a_scaling_that_makes_no_sense_wishes_nothing(body, status, said):
    async with operated() as o:
        found = await o.post("/admin/scale", body)
        assert found[0] == status and said in found[1]["error"]["message"], found
        assert not await o.store.list(DESIRED) and not o.lines


async def test_too_few_gpus_are_named():
    async with operated() as o:
        await o.report("main", "main-0", limit=1, gpus=4)
        _, body = await o.post("/admin/scale", {"pools": {"main": 2}})
        assert "each has 4 GPUs of its own" in body["error"]["message"]


async def test_a_drain_is_wished_for_and_undone():
    async with operated() as o:
        status, body = await o.post("/admin/drain", {"name": "main-1", "timeout": 7})
        assert (status, body["name"], body["kind"]) == (200, "main-1", "engine")
        wish = await o.wish(DRAINS + "main-1", DrainSpec)
        assert (wish.timeout, wish.revision) == (7.0, body["revision"])
        assert (await o.post("/admin/drain", {"name": "there-0"}))[1]["kind"] == "server"
        assert (await o.post("/admin/drain", {"name": "main-1", "undo": True}))[0] == 200
        assert await o.wish(DRAINS + "main-1", DrainSpec) is None
        assert (await o.post("/admin/drain", {"name": "main-1", "undo": True}))[0] == 409
        assert [line[:3] for line in o.lines if line[0] == "drain main-1"] == [
            ("drain main-1", False, True),
            ("drain main-1", True, False),
        ]


async def test_a_frontend_is_drained_by_its_name_with_or_without_its_pid_but_not_the_last_one():
    async with operated() as o:
        status, body = await o.post("/admin/drain", {"name": "frontend-1-12"})
        assert (status, body["name"], body["kind"]) == (200, "frontend-1", "frontend")
        status, body = await o.post("/admin/drain", {"name": "frontend-0"})
        assert status == 409 and "the only frontend" in body["error"]["message"]
        assert (await o.post("/admin/drain", {"name": "frontend-1", "undo": True}))[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"name": "main-7"}, 404, "there are main-0, main-1, there-0, frontend-0, frontend-1"),
        ({"name": "main-0", "timeout": -1}, 400, "timeout is -1 s"),
        ({"name": "main-0", "timeout": 1e9}, 400, "86400"),
        ({"timeout": 1}, 400, "name"),
    ],
)
async def test_a_drain_that_makes_no_sense_wishes_nothing(body, status, said):
    async with operated() as o:
        found = await o.post("/admin/drain", body)
        assert found[0] == status and said in found[1]["error"]["message"], found
        assert not await o.store.list(DRAINS)


async def test_a_restart_is_wished_for():
    async with operated() as o:
        status, body = await o.post("/admin/restart", {"force": True})
        wish = await o.wish(RESTART, RestartSpec)
        assert status == 200 and (wish.revision, wish.force) == (body["revision"], True)
        assert (await o.get("/admin/desired"))[1]["restart"] is None, "nobody has begun"


async def test_settings_are_checked_and_wished_for():
    async with operated() as o:
        body = {"values": {"router.attempts_max": 5, "router.queue.wait_max": "90s", "slo.ttft": None}}
        status, found = await o.post("/admin/set", body)
        assert status == 200
        assert found["changed"] == {
            "router.queue.wait_max": {"old": 60.0, "new": 90.0},
            "router.attempts_max": {"old": 3, "new": 5},
        }
        assert found["values"] == {"router.attempts_max": 5, "router.queue.wait_max": 90.0, "slo.ttft": None}
        wish = await o.wish(SETTINGS + "router.attempts_max", SettingSpec)
        assert (wish.value, wish.by) == (5, "local")
        assert sorted(line[0] for line in o.lines) == ["router.attempts_max", "router.queue.wait_max"]
        _, shown = await o.get("/admin/settings")
        assert shown["settings"]["router.attempts_max"] == 3, "it counts once the node has heard it"
        assert [frontend["name"] for frontend in shown["frontends"]] == ["router"]


async def test_settings_that_can_not_be_change_nothing():
    async with operated() as o:
        body = {"values": {"router.attempts_max": 5, "frontend.port": 1, "router.nope": 1}}
        status, found = await o.post("/admin/set", body)
        assert status == 400
        for said in ("nothing was changed", "frontend.port", "start the cluster again", "router.nope"):
            assert said in found["error"]["message"]
        assert (await o.post("/admin/set", {"values": {}}))[0] == 400
        assert not await o.store.list(SETTINGS) and not o.lines


async def test_a_store_that_fails_is_a_503():
    async with operated() as o:
        o.space.outage = "the disk is gone"
        for path, body in (
            ("/admin/scale", {"pools": {"main": 1}}),
            ("/admin/drain", {"name": "main-0"}),
            ("/admin/restart", {}),
            ("/admin/set", {"values": {"router.attempts_max": 4}}),
        ):
            status, found = await o.post(path, body)
            assert status == 503 and "the disk is gone" in found["error"]["message"], path
        assert (await o.get("/admin/desired"))[0] == 503
        o.space.outage = None
        assert not o.lines


async def test_only_administrators_may_change_anything():
    guarded = FrontendSettings(security=SecuritySettings(admin_keys=("right",)))
    async with operated(guarded) as o:
        for path in ("/admin/scale", "/admin/drain", "/admin/restart", "/admin/set"):
            assert (await o.post(path, {}))[0] == 401
            assert (await o.post(path, {}, headers={"authorization": "Bearer wrong"}))[0] == 401
            headers = {"authorization": "Bearer right", "origin": "http://elsewhere"}
            assert (await o.post(path, {}, headers=headers))[0] == 403
        headers = {"authorization": "Bearer right"}
        assert (await o.post("/admin/scale", {"pools": {"main": 1}}, headers=headers))[0] == 200
        assert o.lines[0][3].startswith("key-")


async def test_a_record_of_a_newer_release_is_left_out():
    async with operated() as o:
        raw = msgspec.json.encode({"version": 99, "pool": "x", "shape": "another"})
        await o.store.put(POOLS + "x", raw)
        await o.store.put(POOLS + "y", b"not json")
        assert [pool["name"] for pool in (await o.get("/admin/desired"))[1]["pools"]] == ["main", "there"]


@pytest.mark.parametrize("path_and_body", [("scale", {"pools": {"main": 3}}), ("drain", {"name": "main-0"})])
async def test_without_a_report_of_any_pool_no_name_is_called_wrong(path_and_body):
    path, body = path_and_body
    async with operated() as o:
        for pool in ("main", "there"):
            await o.store.delete(POOLS + pool)
        status, answer = await o.post(f"/admin/{path}", body)
        assert status == 503 and "no supervisor's report" in answer["error"]["message"]
        assert "there is no" not in answer["error"]["message"]
