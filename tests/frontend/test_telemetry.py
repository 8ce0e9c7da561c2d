"""Are metrics what dashboards query, do several processes add up, and do logs and spans say what happened?"""

import http.server
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.adapters.telemetry.frontend_metrics import SAME_IN_EVERY_PROCESS, FrontendMetrics
from penstock.adapters.telemetry.otel_tracer import OtelTracer
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.adapters.telemetry.prometheus_text import MetricRegistry, merge
from penstock.frontend import logs
from penstock.frontend.record_writer import DiscardingSink, keep_writing
from penstock.kernel.errors import ConfigError
from penstock.runtime.kv_tiers.tier_metrics import TierMetrics
from penstock.runtime.records.run_folder import CsvRows, LineWriter

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
    tracer = OtelTracer(None)
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


def test_spans_hang_below_the_callers_trace_and_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    taken: list[tuple[str, int]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, len(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return None

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tracer = OtelTracer(f"http://127.0.0.1:{server.server_port}")
        trace = "0af7651916cd43dd8448eb211c80319c"
        span = tracer.start("chat", f"00-{trace}-b7ad6b7169203331-01", "a=b")
        assert span.traceparent is not None and span.traceparent.split("-")[1] == trace
        assert span.traceparent.split("-")[2] != "b7ad6b7169203331"
        fresh = tracer.start("chat", None)
        assert fresh.traceparent is not None and fresh.traceparent.split("-")[1] != trace
        span.set("model", "m")
        span.end("it failed")
        fresh.end()
        tracer.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert taken and all(path == "/v1/traces" and size > 100 for path, size in taken)


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
    import asyncio

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

    code = "import sys, penstock.adapters.telemetry.otel_tracer; print('opentelemetry' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
