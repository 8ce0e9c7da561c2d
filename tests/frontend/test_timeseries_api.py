"""Do the routes behind the page's charts say what was seen, over one process and over several?"""

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings
from penstock.frontend.admin import timeseries_api
from penstock.frontend.admin.timeline_store import WIDTH, WINDOWS_MAX
from penstock.kernel.values import Slo
from tests.frontend.stand import Stand, answer, stand

PROMISED = ClusterSettings(models={"m": ModelSettings()}, slo=Slo(ttft=5.0, itl=1.0))


async def told(s: Stand, path: str = "/admin/timeline") -> dict[str, Any]:
    response = await s.http.get(path)
    assert response.status == 200, await response.text()
    found: dict[str, Any] = await response.json()
    return found


def total(found: dict[str, Any], name: str) -> int:
    return sum(value or 0 for value in found["columns"][name])


async def test_traffic_stands_in_the_windows() -> None:
    async with stand(2, settings=PROMISED) as s:
        for _ in range(3):
            response = await s.chat("hello", stream=True)
            await response.read()
        await (await s.chat("hello")).read()  # not streamed: nobody sees its first token
        s.service.timeline_store.look(PROMISED.slo)
        found = await told(s)
        assert found["kind"] == "live" and found["width"] == WIDTH and found["kept"] == WINDOWS_MAX
        assert {name: total(found, name) for name in ("arrived", "ok", "judged", "in_slo")} == {
            "arrived": 4,
            "ok": 4,
            "judged": 3,
            "in_slo": 3,
        }
        assert total(found, "output_tokens") == 20 and total(found, "cached_tokens") == 12
        assert any(found["columns"]["ttft_p95"]) and any(found["columns"]["itl_p50"])
        assert set(found["columns"]["slo_ttft"]) <= {5.0, None}
        assert found["pools"] == {"e0": {"there": [1], "ready": [1]}, "e1": {"there": [1], "ready": [1]}}
        assert set(found["frontends"]) == {"router"}
        assert len({len(column) for column in found["columns"].values()}) == 1


async def test_an_empty_cluster_has_windows_without_numbers() -> None:
    async with stand(0) as s:
        s.service.timeline_store.look(Slo())
        found = await told(s)
        assert total(found, "arrived") == 0 and found["columns"]["ttft_p50"][-1] is None
        assert found["pools"] == {} and found["columns"]["kv_use"][-1] is None
        assert (await told(s, "/admin/timeline/workers"))["workers"] == {}
        assert (await s.http.get("/admin/timeline/workers/main-0")).status == 404


async def test_somebody_looks_without_being_asked() -> None:
    async with stand(1) as s:
        while not s.service.timeline_store.timeline.windows:
            await asyncio.sleep(0.005)
        window = next(iter(s.service.timeline_store.timeline.windows.values()))
        assert window.running == 0 and window.workers is not None


async def test_workers_at_a_moment_and_one_over_time() -> None:
    async with stand(2) as s:
        s.service.timeline_store.look(Slo())
        found = await told(s, f"/admin/timeline/workers?at={s.service.timeline_store.now}")
        assert set(found["workers"]) == {"e0", "e1"} and found["workers"]["e0"]["requests"] == 0
        assert found["workers"]["e0"]["kv_blocks"] is None  # it did not say
        assert (await told(s, "/admin/timeline/workers?at=90000"))["workers"] is None
        one = await told(s, "/admin/timeline/workers/e1")
        assert one["columns"]["requests"][-1] == 0 and one["columns"]["kv_blocks"][-1] is None


async def test_only_what_is_newer_is_told_where_that_is_asked() -> None:
    async with stand(1, offset=100 * 10**9) as s:
        line = s.service.timeline_store.timeline
        now = int(s.service.timeline_store.now // WIDTH)
        line.windows.clear()
        for number in range(now - 3, now + 1):
            line.windows[number] = msgspec.convert({"arrived": 1}, timeseries_api.TimeWindow)
        assert (await told(s))["columns"]["arrived"][:4] == [1, 1, 1, 1]
        found = await told(s, f"/admin/timeline?from={(now - 1) * WIDTH}")
        assert found["first"] == now - 1 and found["columns"]["arrived"][:2] == [1, 1]


@pytest.mark.parametrize("path", ["timeline?from=x", "timeline?from=-1", "timeline?from=nan", "decisions?before=1e99"])
async def test_times_that_are_none_are_refused(path: str) -> None:
    async with stand(1) as s:
        response = await s.http.get(f"/admin/{path}")
        assert response.status == 400 and "seconds since the start" in (await response.json())["error"]["message"]


async def test_windows_of_other_processes_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand(1) as s, stand(1) as other:
        for one, count in ((s, 2), (other, 3)):
            for _ in range(count):
                await (await one.chat("hello")).read()
            one.service.timeline_store.look(Slo())
        part = await told(other, "/admin/timeline?scope=process")
        assert set(part) == {"name", "since", "windows"}
        assert all("loads" not in window for window in part["windows"].values())

        async def peers(service: object, path: str, kind: Any) -> list[Any]:
            response = await other.http.get(path)
            return [msgspec.json.decode(await response.read(), type=kind)]

        monkeypatch.setattr(timeseries_api, "from_peers", peers)
        found = await told(s)
        assert total(found, "arrived") == 5 and total(found, "ok") == 5
        assert found["pools"]["e0"]["there"][-1] in (1, None)  # both see the same workers: they are not added up
        again = await told(s)
        assert total(again, "arrived") == 5  # what this process counted is still its own
        # One that this process has not seen, another one may have.
        s.service.timeline_store.timeline.windows.clear()
        assert (await told(s, "/admin/timeline/workers/e0"))["columns"]["requests"]


async def test_decisions_until_a_moment_and_for_one_worker() -> None:
    async with stand(2) as s:
        for number in range(6):
            await (await s.chat(f"question {number}")).read()
        every = (await told(s, "/admin/decisions?limit=50"))["decisions"]
        assert len(every) == 6
        third = every[3]
        until = (await told(s, f"/admin/decisions?before={third['at'] / 1e9 + 1e-9:.9f}"))["decisions"]
        assert [one["request"] for one in until] == [one["request"] for one in every[3:]]
        mine = (await told(s, "/admin/decisions?worker=e1"))["decisions"]
        assert mine == [one for one in every if one["chosen"][0] == "e1"]
        assert (await told(s, "/admin/decisions?worker=nobody"))["decisions"] == []
        ended = (await told(s, "/admin/requests"))["requests"]
        first = ended[-1]
        assert (await told(s, f"/admin/requests?before={first['closed'] / 1e9 + 1e-9:.9f}"))["requests"] == [first]


async def test_times_count_from_the_start_of_the_run_in_everything_that_is_told() -> None:
    async with stand(1, offset=10**12) as s:
        response = await s.chat("hello", stream=True)
        await response.read()
        request = response.headers["x-penstock-request-id"]
        (decision,) = (await told(s, "/admin/decisions"))["decisions"]
        (closed,) = (await told(s, "/admin/requests"))["requests"]
        assert decision["at"] >= 10**12 and s.service.timeline_store.now >= 1000
        assert all(closed[name] >= 10**12 for name in ("arrived", "first", "closed"))
        assert all(closed["legs"][0][name] >= 10**12 for name in ("dispatched", "first", "last"))
        explained = await told(s, f"/admin/explain/{request}")
        assert explained["request"] == closed and explained["decisions"] == [decision]
        (written,) = s.decisions
        assert msgspec.json.decode(written)["at"] == decision["at"]
        assert s.records[0].arrival >= 1000 and (await told(s))["now"] >= 1000


async def test_a_long_stream_counts_its_first_token_before_its_end() -> None:
    async with stand(1, settings=PROMISED) as s:
        s.engines[0].reply = lambda request, body: answer(request, body, 5, gap=0.05)
        response = await s.chat("hello", stream=True)
        await response.content.readany()
        s.service.bookkeeping.enter()
        window = s.service.timeline_store.timeline.window(s.service.timeline_store.now)
        assert sum(window.ttft.values()) == 1 and window.ended == {}
        await response.read()
