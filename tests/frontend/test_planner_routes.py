"""What planners are told by a frontend, and what people are told of a planner."""

import json

import msgspec

from penstock.adapters.sources.frontend_counters import ClusterCounters, since
from penstock.runtime.planning.planner_report import RECORDS
from tests.frontend.stand import stand


async def told(s) -> ClusterCounters:
    async with s.http.get("/admin/planner/seen") as answer:
        assert answer.status == 200
        return msgspec.json.decode(await answer.read(), type=ClusterCounters)


async def test_requests_are_told_as_they_arrive_and_end():
    async with stand() as s:
        before = await told(s)
        for number in range(3):
            answer = await s.chat(f"hello {number}", stream=True, stream_options={"include_usage": True})
            await answer.read()
        (frontend,) = (await told(s)).frontends
        known = before.frontends[0].models.get("m")
        counts = since(frontend.models["m"].counts, None if known is None else known.counts)
        assert (counts.arrived, counts.answered, counts.output_tokens, counts.lost) == (3, 3, 15, 0)
        assert counts.prompt_tokens == counts.answered_prompt_tokens > 0
        assert (counts.cached_tokens, counts.cache_reported_tokens) == (9, counts.prompt_tokens)
        assert counts.ttft_count == 3
        (engine,) = frontend.engines
        assert (engine.worker, engine.ready, engine.ranks[0].running) == ("e0", True, 0)
        assert engine.steps is None  # a scripted engine tells no passes, which is not the same as none


async def test_who_is_refused_has_arrived_and_is_lost():
    async with stand(0) as s:
        await (await s.chat("nobody is there")).read()
        (frontend,) = (await told(s)).frontends
        counts = frontend.models["m"].counts
        assert (counts.arrived, counts.lost, counts.judged, counts.in_slo) == (1, 1, 1, 0)


async def test_decisions_are_read_from_the_run_folder(tmp_path):
    async with stand() as s:
        async with s.http.get("/admin/planner/decisions") as answer:
            assert await answer.json() == {"planner": None, "last": None, "decisions": []}
        s.service.run = str(tmp_path)
        ticks = [{"tick": n, "outcome": "apply" if n == 2 else "keep"} for n in range(5)]
        (tmp_path / RECORDS).write_text("".join(json.dumps(tick, separators=(",", ":")) + "\n" for tick in ticks))
        async with s.http.get("/admin/planner/decisions?limit=3") as answer:
            found = await answer.json()
        assert (found["last"], found["decisions"]) == (ticks[4], [ticks[2]])
        async with s.http.get("/admin/planner/decisions?limit=3&ticks=all") as answer:
            assert (await answer.json())["decisions"] == [ticks[4], ticks[3], ticks[2]]
        async with s.http.get("/admin/planner/decisions?limit=no") as answer:
            assert answer.status == 400
