"""Does a bench send what its plan says, count what came back, and say when its own figures do not hold?"""

import asyncio
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.request_record import decode_records
from penstock.kernel.time_windows import QUANTILES
from penstock_lab.report.bench import saturation
from penstock_lab.report.bench.bench_outcome import BenchOutcome, as_dict, print_table
from penstock_lab.report.bench.bench_run import BenchOptions, main, run
from penstock_lab.report.outcome import json_text
from tests.lab.report.fake_server import Answer, FakeServer, fake_server

ROW = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty prompts, 10 ms apart, that share their first block."""
    path = tmp_path / "trace.jsonl"
    rows = [{**ROW, "timestamp": 10 * number, "hash_ids": [1, 100 + number]} for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(server: FakeServer, tmp_path: Path, **changes: Any) -> BenchOptions:
    return BenchOptions(url=server.url, out=tmp_path / "runs", **changes)


def records_of(outcome: BenchOutcome) -> list[Any]:
    with (Path(outcome.run) / "requests.jsonl").open("rb") as lines:
        return decode_records(lines)


def names_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


async def test_a_trace_is_sent_as_planned_and_counted(tmp_path: Path, trace: Path) -> None:
    async with fake_server() as server:
        outcome = await run(options(server, tmp_path, trace=trace, seed=5))
    assert outcome.summary.ok == 20
    bodies = server.bodies
    assert all(len(body["prompt"]) == 600 and body["max_tokens"] == 9 and body["stream"] for body in bodies)
    assert all(body["prompt"][:512] == bodies[0]["prompt"][:512] for body in bodies)
    assert len({tuple(body["prompt"][512:]) for body in bodies}) == 20
    tags = {each["x-request-id"].rpartition("-")[0] for each in server.headers}
    assert len(tags) == 1 and len({each["x-request-id"] for each in server.headers}) == 20

    assert outcome.summary.hit_rate == pytest.approx(64 / 600)
    assert outcome.bound == pytest.approx((19 * 512 + 64) / (20 * 600)), (
        "the first found 64 tokens that were there before"
    )
    assert outcome.share_of_bound == pytest.approx((64 / 600) / outcome.bound)
    assert outcome.counting == {"usage": 20}

    found = records_of(outcome)
    assert len(found) == 20
    one = found[0]
    assert (one.isl, one.osl, one.cached, one.expected_cached, one.worker) == (600, 9, 64, 64, "sim-0")
    assert one.queued == pytest.approx(0.0015)
    assert one.itl is not None
    assert one.itl.gaps == 8
    assert one.itl.mean == pytest.approx(one.tpot)
    assert 0 < one.ttft < one.e2e
    assert sorted(each.arrival for each in found)[-1] >= 0.19


async def test_arrivals_do_not_wait_for_answers(tmp_path: Path, trace: Path) -> None:
    """No answer comes before all requests are there: a closed loop would never end."""
    async with fake_server(lambda number, _: Answer(chunks=[1, 1], after=20)) as server:
        outcome = await run(options(server, tmp_path, trace=trace))
        assert outcome.summary.ok == 20
        arrived = [record.arrival for record in records_of(outcome)]
        assert max(arrived) < min(record.arrival + record.e2e for record in records_of(outcome))


async def test_each_way_to_end_is_counted_apart(tmp_path: Path, trace: Path) -> None:
    script = {
        0: Answer(status=429),
        1: Answer(status=503),
        2: Answer(status=400),
        3: Answer(status=500),
        4: Answer(done=False),
        5: Answer(cut=True),
        6: Answer(hang=True),
    }
    async with fake_server(lambda number, _: script.get(number, Answer(worker=f"sim-{number % 2}"))) as server:
        outcome = await run(options(server, tmp_path, trace=trace, timeout=1.5, slo_ttft=1.0, slo_itl=1.0))
    summary = outcome.summary
    assert (summary.ok, summary.rejected, summary.failed, summary.expired) == (13, 2, 4, 1)
    assert summary.in_slo == 13
    assert summary.goodput_share == pytest.approx(13 / 20)
    faults = {record.fault for record in records_of(outcome) if record.outcome == "failed"}
    assert faults == {"client", "engine"}
    assert {name: share.requests for name, share in summary.workers.items()} == {"sim-0": 6, "sim-1": 7}
    assert any("HTTP 400" in note for note in outcome.notes)


async def test_streams_without_counts_are_said(tmp_path: Path, trace: Path) -> None:
    async with fake_server(lambda number, _: Answer(usage=False, cached=None)) as server:
        outcome = await run(options(server, tmp_path, trace=trace))
    assert outcome.counting == {"chunks": 20}
    assert outcome.summary.hit_rate is None
    assert outcome.share_of_bound is None
    told = " ".join(outcome.notes)
    assert "each chunk counts as one token" in told
    assert "do not add up" in told
    assert "hit rate is unknown" in told
    assert outcome.summary.output_tokens == 20 * 9


async def test_too_many_in_flight_make_the_run_invalid(tmp_path: Path, trace: Path) -> None:
    async with fake_server(lambda number, _: Answer(gap=0.3)) as server:
        outcome = await run(options(server, tmp_path, trace=trace, max_inflight=4))
    assert outcome.summary.unsent == 16
    assert len(server.bodies) == 4
    assert not outcome.valid
    assert "inflight_max" in as_dict(outcome)["invalid_because"]
    assert outcome.summary.goodput_share is not None
    assert outcome.summary.goodput_share <= 4 / 20


@pytest.mark.parametrize(("workload", "form"), [("chat", "tokens"), ("rag", "text"), ("agent", "tokens")])
async def test_workloads_are_sent(tmp_path: Path, workload: Any, form: Any) -> None:
    async with fake_server() as server:
        outcome = await run(
            options(
                server, tmp_path, workload=workload, form=form, rate=50.0, speed_up=4.0, requests=25, arrivals="gamma"
            )
        )
    assert outcome.summary.ok == 25
    assert all(("messages" in body) == (form == "text") for body in server.bodies)
    assert (outcome.bound is None) == (form == "text")
    assert {record.service_class for record in records_of(outcome)} == {workload}
    assert {each["x-penstock-context-type"] for each in server.headers} == {workload}


async def test_a_duration_ends_a_run(tmp_path: Path) -> None:
    async with fake_server() as server:
        outcome = await run(options(server, tmp_path, workload="rag", rate=40.0, duration=0.5))
    assert 0 < outcome.summary.submitted < 60  # the workload itself has no end


async def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, trace: Path) -> None:
    all_there = asyncio.Event()

    def script(number: int, _: dict[str, Any]) -> Answer:
        if number == 19:
            all_there.set()
        return Answer(hang=number > 4)

    async with fake_server(script) as server:
        task = asyncio.create_task(run(options(server, tmp_path, trace=trace)))
        await all_there.wait()
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await task
    assert outcome.summary.ok == 5
    assert outcome.summary.cancelled == 15
    assert "interrupted" in as_dict(outcome)["invalid_because"]


async def test_what_can_not_be_is_refused_before_anything_is_sent(tmp_path: Path, trace: Path) -> None:
    async with fake_server(models=("a", "b")) as server:
        with pytest.raises(ConfigError, match="choose one"):
            await run(options(server, tmp_path, trace=trace))
        with pytest.raises(ConfigError, match="does not serve 'c'"):
            await run(options(server, tmp_path, trace=trace, model="c"))
        with pytest.raises(ConfigError, match="no request in the slice"):
            await run(options(server, tmp_path, trace=trace, model="a", trace_start=9.0))
        assert not server.bodies
    with pytest.raises(EngineError, match="is the server up"):
        await run(options(server, tmp_path, trace=trace))
    with pytest.raises(ConfigError, match="can't be read"):
        await run(options(server, tmp_path, trace=tmp_path / "none"))
    with pytest.raises(ConfigError) as caught:
        BenchOptions(url="host:1", rate=0, token_range=(4, 5), trace_start=5, trace_end=4).check()
    for part in ("either a trace", "URL", "rate", "token range", "slice"):
        assert part in caught.value.message


async def test_the_run_folder_draws_itself(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_server() as server:
        outcome = await run(options(server, tmp_path, trace=trace))
    folder = Path(outcome.run)
    assert {"run.json", "requests.jsonl", "bench.json", "report.html"} <= names_in(folder)
    assert (folder / "report-ttft.csv").read_text().startswith("ttft_s,share\n")
    assert json.loads((folder / "bench.json").read_text()) == json.loads(json_text(as_dict(outcome)))
    print_table(outcome)
    printed = capsys.readouterr().out
    assert "TTFT" in printed
    assert outcome.run in printed


async def test_what_no_clock_measured_is_the_same_in_every_run(tmp_path: Path, trace: Path) -> None:
    async with fake_server() as server:
        first = as_dict(await run(options(server, tmp_path, trace=trace)))
        second = as_dict(await run(options(server, tmp_path, trace=trace)))
    names = ("requests", "tokens", "hit_rate", "hit_rate_bound", "block_size", "slo", "workers", "model", "seed")
    assert [first[name] for name in names] == [second[name] for name in names]
    assert list(first) == list(second) and not any(key.startswith("wall") for key in first)
    assert {f"ttft_{point}_s" for point in QUANTILES} <= first.keys(), "those of status and page"


def test_verdicts() -> None:
    calm = saturation.CpuSampler(samples=[0.5] * 20)
    hot = saturation.CpuSampler(samples=[0.5] * 17 + [0.99] * 3)

    def by(late: float) -> list[tuple[float, float]]:
        return [(0.1 * number, late if number % 10 == 9 else 0.0) for number in range(200)]

    assert saturation.judge(lateness=by(0.001), mean_gap=0.001, ttft_p50=0.001, cpu=calm) == []
    assert saturation.judge(lateness=by(0.01), mean_gap=0.05, ttft_p50=0.2, cpu=calm) == []
    found = saturation.judge(lateness=[*by(0.02), (17.3, 0.5)], mean_gap=0.05, ttft_p50=0.05, cpu=hot)
    assert saturation.reasons(found) == ["late", "cpu"]
    assert "21 of 201 requests were sent over 12.5 ms late" in found[0][1]
    assert "the worst 500.0 ms at second 17, when the machine's CPUs were 99% busy" in found[0][1]
    assert saturation.judge(lateness=[], mean_gap=None, ttft_p50=None, cpu=saturation.CpuSampler()) == []


@pytest.mark.parametrize(("strict", "status"), [(False, 0), (True, 1)])
async def test_a_busy_machine_is_a_warning_unless_strict(tmp_path, trace, monkeypatch, capsys, strict, status) -> None:
    monkeypatch.setattr(saturation, "LATE_FLOOR", -1.0)
    monkeypatch.setattr(saturation, "LATE_SHARE", -1.0)  # so that whatever is sent is late
    async with fake_server() as server:
        arguments = options(server, tmp_path, trace=trace, strict=strict)
        assert await asyncio.to_thread(main, arguments) == status
    assert "WARNING: 20 of 20 requests were sent" in capsys.readouterr().out


async def test_two_runs_of_one_seed_have_ids_of_their_own_and_the_bound_counts_what_was_warm(tmp_path, trace) -> None:
    async with fake_server(lambda number, body: Answer(cached=600)) as server:
        first = await run(options(server, tmp_path, trace=trace, seed=5))
        second = await run(options(server, tmp_path, trace=trace, seed=5))
    assert len({each["x-request-id"] for each in server.headers}) == 40
    for outcome in (first, second):
        assert outcome.summary.hit_rate is not None and outcome.bound is not None
        assert outcome.summary.hit_rate <= outcome.bound + 1e-9
        assert any("no earlier prompt of this run had" in note for note in outcome.notes)


def test_cpu_is_read_where_the_system_tells(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 5 80 5 0 0 2 0 0\n")
    assert saturation.read_cpu(stat) == (17, 102)
    assert saturation.read_cpu(tmp_path / "none") is None
    stat.write_text("nothing\n")
    assert saturation.read_cpu(stat) is None


def test_a_trace_that_knows_only_lengths_can_be_sent(tmp_path: Path) -> None:
    from penstock_lab.report.bench.bench_plan import plan_of

    trace = tmp_path / "azure.csv"
    rows = ("2023-11-16 18:17:03.9799600,37,4", "2023-11-16 18:17:04.9799600,37,5")
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)) + "\n")
    one, other = plan_of(BenchOptions(url="http://x", trace=trace)).shots("m", None)
    prompts = [json.loads(shot.body)["prompt"] for shot in (one, other)]
    assert [len(prompt) for prompt in prompts] == [37, 37] and prompts[0][0] != prompts[1][0]
    assert other.due == pytest.approx(1.0)


def test_steady_options_make_the_same_plan(trace: Path) -> None:
    from penstock_lab.report.bench.bench_plan import plan_of

    def shots() -> list[tuple[float, bytes]]:
        wanted = BenchOptions(url="http://x", trace=trace, spread_ties=True, speed_up=2.0)
        return [(shot.due, shot.body) for shot in itertools.islice(plan_of(wanted).shots("m", None), 20)]

    assert shots() == shots()
    assert shots()[2][0] == pytest.approx(0.01)
