"""Are metrics what dashboards query, do several processes add up, and do logs and spans say what happened?"""

import asyncio
import http.server
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.adapters.telemetry.frontend_metrics import SAME_IN_EVERY_PROCESS, FrontendMetrics
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.adapters.telemetry.prometheus_text import MetricRegistry, merge
from penstock.adapters.telemetry.request_span import NoTracer
from penstock.frontend import logs
from penstock.frontend.record_writer import DiscardingSink, keep_writing
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import WorkerId
from penstock.router.events import WorkerCordoned
from penstock.runtime.records.run_folder import CsvRows, LineWriter
from penstock_extras.telemetry.otel_tracer import OtelTracer
from penstock_kv.tiers.tier_metrics import TierMetrics
from tests.frontend.stand import stand

WANTED = (
    "dynamo_frontend_requests_total",
    "dynamo_frontend_requests_started_total",
    "dynamo_frontend_time_to_first_token_seconds",
    "dynamo_frontend_inter_token_latency_seconds",
    "dynamo_frontend_input_sequence_tokens",
    "dynamo_frontend_output_sequence_tokens",
    "dynamo_frontend_request_duration_seconds",
    "dynamo_frontend_cached_tokens",
    "dynamo_frontend_queued_requests",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_active_requests",
    "dynamo_frontend_output_tokens_total",
    "dynamo_frontend_disconnected_clients",
    "dynamo_frontend_model_ready",
    "dynamo_component_router_kv_hit_rate",
    "dynamo_component_router_requests_total",
    "dynamo_component_router_overlap_blocks_lost",
    "dynamo_component_kv_cache_events_applied",
    "dynamo_component_router_worker_registered",
)


def parse(text: str) -> dict[str, float]:
    """Read samples back: name with labels -> value."""
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: float(value) for key, _, value in samples}


def test_names_that_dashboards_query_are_there() -> None:
    families = FrontendMetrics("r").registry.families
    assert [name for name in WANTED if name not in families] == []
    assert all(name in families for name in SAME_IN_EVERY_PROCESS)


@pytest.mark.parametrize("metrics", [FrontendMetrics("r"), PlannerMetrics(), TierMetrics()])
def test_counters_and_only_they_end_in_total(metrics: FrontendMetrics | PlannerMetrics | TierMetrics) -> None:
    """As promtool demands; a count that others named otherwise has no type."""
    kinds = {name: family.kind for name, family in metrics.registry.families.items()}
    assert [name for name, kind in kinds.items() if name.endswith("_total") != (kind == "counter")] == []


def test_text_is_what_prometheus_reads() -> None:
    metrics = FrontendMetrics("r")
    metrics.started("m", "completions", True, 'odd "type"\nwith\\all')
    metrics.ttft.observe(0.05, "m")
    metrics.registry.gauge("odd_numbers", "inf and nan").set(to=float("inf"))
    found = {f.name: f for f in text_string_to_metric_families(metrics.render())}
    ttft = found["dynamo_frontend_time_to_first_token_seconds"]
    counts = {s.labels["le"]: s.value for s in ttft.samples if s.name.endswith("_bucket")}
    assert counts["0.047"] == 0 and counts["0.1"] == 1 and counts["+Inf"] == 1
    types = found["penstock_requests_by_context_type"].samples
    assert types[0].labels["context_type"] == 'odd "type"\nwith\\all'


@given(st.lists(st.lists(st.floats(0, 100), max_size=20), min_size=1, max_size=4))
def test_merged_processes_equal_one_that_saw_everything(parts: list[list[float]]) -> None:
    def seen(values: list[float]) -> MetricRegistry:
        registry = MetricRegistry()
        histogram = registry.histogram("h", "help", (1, 10, 50), "model")
        counter = registry.counter("c", "help")
        gauge = registry.gauge("g", "help")
        for value in values:
            histogram.observe(value, "m")
            counter.add()
        gauge.set(to=max(values, default=0.0))
        return registry

    merged = parse(merge([seen(values).render() for values in parts], ["g"]))
    whole = parse(seen([value for values in parts for value in values]).render())
    assert merged.keys() == whole.keys()
    assert all(merged[name] == pytest.approx(whole[name]) for name in whole)


def test_registering_twice_is_a_mistake() -> None:
    registry = MetricRegistry()
    registry.counter("a", "x")
    with pytest.raises(ValueError, match="exists"):
        registry.gauge("a", "x")


# --- logs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[None]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_text_and_json_lines(root: None) -> None:
    fields = {"request": "r 1", "status": 200, "seconds": 0.25, "none": None, "evil": 'a="b"\nnext'}
    out = io.StringIO()
    logs.setup("text", "info", out)
    logging.getLogger("penstock.access").info("POST %s", "/v1", extra={"fields": fields})
    logging.getLogger("x").debug("not shown")
    line = out.getvalue()
    assert line.count("\n") == 1 and 'request="r 1" status=200 seconds=0.25 evil="a=\\"b\\"\\nnext"' in line
    assert "none=" not in line
    out = io.StringIO()
    logs.setup("json", "debug", out)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("failed", extra={"fields": {"message": "no clash", **fields}})
    found = json.loads(out.getvalue())
    assert found["message"] == "failed" and found["request"] == "r 1" and "boom" in found["exception"]


def test_lines_are_written_together_but_warnings_at_once(root: None) -> None:
    out = io.StringIO()
    handler = logs.setup("text", "info", out, batch=True)
    logger = logging.getLogger("x")
    logger.info("one")
    assert out.getvalue() == ""
    logger.warning("two")
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["one", "two"]
    handler.log_line("info", "x", "three", {"status": 200, "reason": None})
    logger.info("four")
    assert "three" not in out.getvalue()
    handler.flush()
    assert [line.split("x ")[-1] for line in out.getvalue().splitlines()[2:]] == ["three status=200", "four"]
    for number in range(logs.LINES_MAX + 1):
        handler.log_line("info", "x", "five", {"number": number})
    assert f"number={logs.LINES_MAX}" in out.getvalue()
    logger.info("six")
    out.close()
    handler.flush()
    assert handler.lost == 1


# --- spans ----------------------------------------------------------------------------------------------------------


def test_no_endpoint_no_library() -> None:
    tracer = NoTracer()
    span = tracer.start("x", "00-aa-bb-01")
    assert span.traceparent is None
    span.set("a", 1)
    span.event("e")
    span.end("error")
    tracer.close()


def test_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigError, match=r"penstock\[otel\]"):
        OtelTracer("http://127.0.0.1:4318")


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Take spans as an OTLP collector does: its URL, and the spans that came."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return None

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes of OTLP as a dict."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def test_spans_hang_below_the_callers_trace_and_reach_a_collector() -> None:
    with collector() as (url, spans):
        tracer = OtelTracer(url)
        trace = "0af7651916cd43dd8448eb211c80319c"
        span = tracer.start("chat", f"00-{trace}-b7ad6b7169203331-01", "a=b")
        assert span.traceparent is not None and span.traceparent.split("-")[1] == trace
        assert span.traceparent.split("-")[2] != "b7ad6b7169203331"
        fresh = tracer.start("chat", None)
        assert fresh.traceparent is not None and fresh.traceparent.split("-")[1] != trace
        span.set("model", "m")
        span.set("unknown", None)
        span.event("moment", {"n": 1, "unknown": None}, at=5)
        span.end("it failed")
        fresh.end()
        tracer.close()
    assert len(spans) == 2 and spans[0].trace_id.hex() == trace and spans[0].status.message == "it failed"
    assert plain(spans[0].attributes) == {"model": "m"} and plain(spans[0].events[0].attributes) == {"n": 1}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_requests_span_says_where_it_went_and_why_and_which_attempts_failed(streamed: bool) -> None:
    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "out of memory"}}, status=500)

    with collector() as (url, spans):
        async with stand(3, card={"block_size": 16}) as s:
            s.service.tracer = OtelTracer(url)
            s.engines[1].reply = fail
            for number in range(30):  # until one was placed at an engine that fails first
                response = await s.chat(f"{number} is another one " * 20, stream=streamed)
                assert response.status == 200, await response.text()
                await response.read()
                s.service.bookkeeping.enter()
                if len(s.kept_records[-1].legs) > 1:
                    break
            await asyncio.to_thread(s.service.tracer.close)
            decisions = [msgspec.json.decode(msgspec.json.encode(one)) for one in s.kept_decisions]
            record = msgspec.to_builtins(s.kept_records[-1])
    span = next(one for one in spans if plain(one.attributes)["penstock.request"] == record["id"])
    found, placed = plain(span.attributes), [one for one in decisions if one["request"] == record["id"]]
    last = placed[-1]
    costs = {cost["target"][0]: cost for cost in last["candidates"]}
    mine = costs.pop(last["chosen"][0])
    assert found["penstock.worker"] == last["chosen"][0] != "e1" and found["penstock.outcome"] == "ok"
    assert found["penstock.decision.reason"] == last["reason"] and found["penstock.decision.mode"] == last["mode"]
    assert found["penstock.decision.cost"] == pytest.approx(mine["total"])
    assert found["penstock.decision.cost_unit"] == mine["unit"]
    assert found["penstock.decision.overlap_blocks"] == mine["overlap_blocks"]
    assert found["penstock.decision.candidates"] == len(last["candidates"])
    assert found["penstock.attempts"] == len(placed) == len(record["legs"]) > 1
    if costs:
        best = min(costs.values(), key=lambda cost: cost["total"])
        assert found["penstock.decision.runner_up"] == best["target"][0]
        assert found["penstock.decision.runner_up_cost"] == pytest.approx(best["total"])
    events = [(one.name, plain(one.attributes), one.time_unix_nano) for one in span.events]
    attempts = [attributes for name, attributes, _ in events if name == "attempt"]
    assert [one["penstock.worker"] for one in attempts] == [one["chosen"][0] for one in placed]
    assert [one["penstock.decision.reason"] for one in attempts] == [one["reason"] for one in placed]
    assert "penstock.decision.runner_up" in attempts[0]
    failed = [(attributes, at) for name, attributes, at in events if name == "attempt_failed"]
    assert [one["penstock.worker"] for one, _ in failed] == [one["chosen"][0] for one in placed[:-1]]
    assert all("out of memory" in one["penstock.failure"] for one, _ in failed)
    documented = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
    names = {name for one in (found, *(attributes for _, attributes, _ in events)) for name in one}
    assert {name for name in names if f"`{name}`" not in documented} == set()
    assert all(span.start_time_unix_nano <= at <= span.end_time_unix_nano for _, at in failed)


async def test_a_request_that_was_never_placed_has_a_span_without_a_decision() -> None:
    with collector() as (url, spans):
        async with stand(1) as s:
            s.service.tracer = OtelTracer(url)
            s.live.post("router", WorkerCordoned(worker=WorkerId("e0"), on=True, reason="by the test"))
            response = await s.chat("hello")
            assert response.status == 503
            await asyncio.to_thread(s.service.tracer.close)
    (span,) = spans
    found = plain(span.attributes)
    assert found["penstock.outcome"] == "rejected" and found["penstock.attempts"] == 0
    assert not any(name.startswith("penstock.decision") for name in found) and span.status.message


# --- records --------------------------------------------------------------------------------------------------------


def test_csv_rows_survive_a_full_disk(tmp_path: Path) -> None:
    rows = CsvRows(tmp_path / "gone" / "metrics.csv")
    rows.append({"a": 1.0, "b": None})
    assert rows.lost == 1
    (tmp_path / "gone").mkdir()
    rows.append({"a": 2.0, "b": 0.5})
    rows.append({"b": 3.0})
    assert rows.path.read_text() == "a,b\n2,0.5\n,3\n"


async def test_writers_are_flushed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.record_writer.FLUSH_EVERY", 0.01)
    threads: list[int] = []

    class Slow(DiscardingSink):
        def flush(self) -> None:
            threads.append(threading.get_ident())

    task = asyncio.create_task(keep_writing(lambda: None, [Slow()], None, dict))
    async with asyncio.timeout(5):
        while not threads:
            await asyncio.sleep(0.01)
    task.cancel()
    assert threading.get_ident() not in threads


def test_lines_that_come_while_others_are_written_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LineWriter(tmp_path / "x.jsonl", lines_max=4)
    append = writer._append

    def slow(data: bytes) -> None:
        writer.write({"n": 2})
        append(data)

    monkeypatch.setattr(writer, "_append", slow)
    writer.write({"n": 1})
    writer.flush()
    monkeypatch.undo()
    writer.flush()
    assert [json.loads(line)["n"] for line in writer.path.read_text().splitlines()] == [1, 2]

    def full(data: bytes) -> None:
        writer.write({"n": "during"})
        raise OSError("no space left")

    monkeypatch.setattr(writer, "_append", full)
    for number in range(4):
        writer.write({"n": number})
    writer.flush()
    assert writer.lost == 1 and writer.failing is not None
    monkeypatch.undo()
    writer.flush()
    kept = [json.loads(line)["n"] for line in writer.path.read_text().splitlines()]
    assert kept == [1, 2, 1, 2, 3, "during"]


def test_module_import_is_lazy() -> None:
    import subprocess

    code = "import sys, penstock_extras.telemetry.otel_tracer; print('opentelemetry' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
