"""Command ``penstock bench``: loads a server, writes a run folder, prints a table or JSON."""

import asyncio
import contextlib
import gc
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.adapters.engines.describe import models_in
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import RecordFault, RequestLeg, RequestRecord, gaps_of, summarise_gaps
from penstock.kernel.values import Slo
from penstock.runtime.records.run_folder import RunFolder
from penstock_lab.report.bench import saturation
from penstock_lab.report.bench.bench_outcome import BenchOutcome, as_dict, print_table
from penstock_lab.report.bench.bench_plan import BenchOptions, BenchPlan, plan_of
from penstock_lab.report.bench.load_generator import LoadGenerator, ShotSample
from penstock_lab.report.outcome import json_text
from penstock_lab.report.run.run_page import write_gaps, write_report
from penstock_lab.report.run.run_summary import summarise
from penstock_lab.report.traffic_options import trace_notes
from penstock_lab.traffic.hit_rate_bound import InfiniteCache
from penstock_lab.traffic.traffic_request import TrafficRequest

PROBE_TIMEOUT = 30.0


async def model_and_block_size(http: aiohttp.ClientSession, options: BenchOptions) -> tuple[str, int | None]:
    """Return the model to request, and the block size if it was given or the server reports it.

    Raises:
        EngineError: the server can't be reached, or has no list of models and none was chosen.
        ConfigError: it serves no such model, or several where none was chosen.
    """
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    answer = await _json_at(http, f"{options.base}/v1/models", headers)
    if isinstance(answer, str):
        refused = answer.startswith(("HTTP 401", "HTTP 403"))
        if refused or options.model is None or not answer.startswith("HTTP "):
            hint = "give the right key with --api-key" if refused else "is the server up, and is the URL right?"
            raise EngineError(f"{options.base}/v1/models: {answer}", hint=hint)
        answer = {}
    names = [entry["id"] for entry in models_in(answer)]
    model = options.model
    if model is None:
        if len(names) != 1:
            raise ConfigError(f"the server serves {', '.join(names) or 'no model'}", hint="choose one with --model")
        model = names[0]
    elif names and model not in names:
        raise ConfigError(f"the server does not serve {model!r}", hint=f"it serves {', '.join(names)}")
    if options.block_size is not None:
        return model, options.block_size
    status = await _json_at(http, f"{options.base}/admin/status", headers)
    if not isinstance(status, str):
        for entry in status.get("models", []):
            if isinstance(entry, dict) and entry.get("name") == model and isinstance(entry.get("block_size"), int):
                return model, entry["block_size"]
    return model, None


async def _json_at(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> dict[str, Any] | str:
    """Return the JSON object at a URL, or a sentence on why there is none."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT), http.get(url, headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                return f"HTTP {response.status}: {body[:200].decode('utf-8', 'replace')}"
            value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        return f"HTTP 200 without JSON: {error}"
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, dict) else "HTTP 200 without a JSON object"


REFRESH = 0.25


@contextmanager
def progress_bar(wanted: bool, plan: BenchPlan, generator: LoadGenerator, counts: Counter[str]) -> Iterator[None]:
    """Show requests sent, in flight and ended while the block runs; needs a running event loop."""
    if not wanted or not sys.stderr.isatty():
        yield
        return
    columns = (
        TextColumn("sending"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    # Drawn by our own task: rich's own thread would take the interpreter lock in the middle of a burst.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        line = bar.add_task("", total=plan.total, state="")

        def draw() -> None:
            broken = sum(counts[name] for name in ("failed", "expired", "unsent"))
            state = f"{generator.inflight} in flight, {counts['ok']} ok, {counts['rejected']} rejected, {broken} failed"
            bar.update(line, completed=generator.sent, state=state)
            bar.refresh()

        async def often() -> None:
            while True:
                draw()
                await asyncio.sleep(REFRESH)

        task = asyncio.get_running_loop().create_task(often())
        try:
            yield
        finally:
            task.cancel()
            draw()


__all__ = ["BenchOptions", "main", "run"]

FLUSH_EVERY = 1.0


def main(options: BenchOptions, tls: ssl.SSLContext | None = None) -> int:
    """Run a bench to its end.

    Args:
        tls: of https; None trusts the system's certificates.
    Returns: exit status: 0, or 1 where the run is invalid, or doubtful and ``strict`` (its reason is printed).
    Raises:
        ConfigError: an option, the trace or the run folder is at fault; nothing was sent.
        EngineError: the server can't be reached, or does not serve that model.
    """
    options.check()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(options, tls))
    if options.json:
        sys.stdout.write(json_text(as_dict(outcome)))
    else:
        print_table(outcome)
    return 1 if outcome.invalid or (options.strict and outcome.doubts) else 0


async def run(options: BenchOptions, tls: ssl.SSLContext | None = None) -> BenchOutcome:
    """Load the server and leave a run folder; see `main` for the errors."""
    plan = plan_of(options)
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, ssl=True if tls is None else tls)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as http:
        model, block_size = await model_and_block_size(http, options)
        folder = RunFolder.create(options.out, "bench", config=_config_yaml(options, model), seed=options.seed)
        return await _load_server(http, options, plan, folder, model, block_size)


async def _load_server(
    http: aiohttp.ClientSession,
    options: BenchOptions,
    plan: BenchPlan,
    folder: RunFolder,
    model: str,
    block_size: int | None,
) -> BenchOutcome:
    cache = None if options.text or block_size is None else InfiniteCache(block_size)
    collector = _Collector(options, plan, model, folder)
    generator = LoadGenerator(
        http, options.base, inflight_max=options.max_inflight, timeout=options.timeout, ended=collector.ended
    )
    cpu = saturation.CpuSampler()
    tasks = [asyncio.create_task(cpu.run()), asyncio.create_task(collector.flush_often())]
    try:
        with (
            _interruptible(generator) as interrupted,
            progress_bar(not options.json, plan, generator, collector.counts),
        ):
            await generator.run(plan.shots(model, cache))
    finally:
        gc.unfreeze()
        await cancel_all(tasks)
        collector.flush()
    outcome = _judged_outcome(options, plan, folder, collector, cpu, cache, model, bool(interrupted))
    (folder.path / "bench.json").write_text(json_text(as_dict(outcome)))
    write_gaps(folder.path, sorted(collector.gaps.items()))
    if options.html:
        await asyncio.to_thread(write_report, folder.path)
    return outcome


class _Collector:
    """Turns samples into records as requests end, and keeps the data for the summary."""

    def __init__(self, options: BenchOptions, plan: BenchPlan, model: str, folder: RunFolder) -> None:
        self.records: list[RequestRecord] = []
        self.gaps: Counter[float] = Counter()
        self.counts: Counter[str] = Counter()
        self.counting: Counter[str] = Counter()
        self.inexact = 0
        self.warm = 0
        """Prompt tokens that were cached although no earlier prompt of this run had them."""
        self._options = options
        self._plan = plan
        self._model = model
        self._writer = folder.writer("requests.jsonl")

    def ended(self, sample: ShotSample) -> None:
        """Record one request that ended."""
        request = self._plan.requests.pop(sample.key)
        record = record_of(sample, request, self._options, self._model, self._plan.id_of(sample.key))
        self.warm += max(0, (record.cached or 0) - self._plan.hits.pop(sample.key, 0))
        self.records.append(record)
        self.counts[record.outcome] += 1
        if record.outcome == "ok":
            for gap, count in gaps_of(sample.chunks):
                self.gaps[float(f"{gap:.3g}")] += count  # three digits keep the distribution in bounded memory
            self.counting[sample.counting or "none"] += 1
            self.inexact += not sample.exact
        self._writer.write(record)

    async def flush_often(self) -> None:
        """Write records down every second, so that a crash of this process costs little."""
        while True:
            await asyncio.sleep(FLUSH_EVERY)
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()


def record_of(sample: ShotSample, request: TrafficRequest, options: BenchOptions, model: str, id: str) -> RequestRecord:
    """Return the record of a request from its client's view; times from the moment of sending.

    Args:
        id: the id that it was sent under.
    """
    first = sample.chunks[0][0] if sample.chunks else None
    last = sample.chunks[-1][0] if sample.chunks else None
    worker = sample.headers.get("x-penstock-worker")
    failure = None if sample.ending == "ok" else sample.reason
    legs: list[RequestLeg] = []
    if worker is not None:
        legs = [
            RequestLeg(
                role="aggregated", worker=worker, dispatched=sample.sent, first=first, last=last, failure=failure
            )
        ]
    queued = _header_number(sample.headers.get("x-penstock-queue-ms"))
    expected = _header_number(sample.headers.get("x-penstock-expected-cached-tokens"))
    planned = None if options.text else request.isl  # a text prompt's length is only an estimate
    return RequestRecord(
        id=sample.headers.get("x-penstock-request-id", id),
        arrival=sample.sent,
        model=model,
        outcome=sample.ending,
        fault=_fault_of(sample),
        service_class=request.kind,
        isl=sample.prompt_tokens if sample.prompt_tokens is not None else planned,
        osl=sample.tokens,
        osl_requested=request.osl,
        cached=sample.cached,
        expected_cached=None if expected is None else int(expected),
        legs=legs,
        ttft=None if first is None else first - sample.sent,
        e2e=None if last is None else last - sample.sent,
        itl=None if first is None else summarise_gaps([(at - first, count) for at, count in sample.chunks]),
        queued=None if queued is None else queued / 1000,
        status=sample.status,
        reason=sample.reason,
        session=request.session,
        program=request.program,
        turn=request.turn if request.session is not None else None,
        lateness=sample.lateness,
    )


def _fault_of(sample: ShotSample) -> RecordFault:
    if sample.ending in ("ok", "cancelled", "unsent"):
        return "none"
    if sample.ending == "rejected":
        return "overloaded"
    if sample.ending == "expired":
        return "deadline"
    return "client" if sample.status is not None and 400 <= sample.status < 500 else "engine"


def _judged_outcome(
    options: BenchOptions,
    plan: BenchPlan,
    folder: RunFolder,
    collector: _Collector,
    cpu: saturation.CpuSampler,
    cache: InfiniteCache | None,
    model: str,
    interrupted: bool,
) -> BenchOutcome:
    slo = Slo(ttft=options.slo_ttft, itl=options.slo_itl)
    summary = summarise(collector.records, slo, collector.gaps.items())
    sent = summary.submitted - summary.unsent
    doubts = saturation.judge(
        lateness=[(record.arrival, record.lateness) for record in collector.records if record.lateness is not None],
        mean_gap=summary.arrivals_span / (sent - 1) if sent > 1 else None,
        ttft_p50=None if summary.ttft is None else summary.ttft.p50,
        cpu=cpu,
    )
    invalid: list[tuple[saturation.Reason, str]] = []
    if summary.unsent:
        invalid.append(
            ("inflight_max", f"{counted(summary.unsent, 'request')} not sent: {options.max_inflight} in flight")
        )
    if interrupted:
        invalid.append(("interrupted", "the run was interrupted"))
    if not summary.ok:
        invalid.append(("no_answers", "no request was answered in full"))
    return BenchOutcome(
        summary=summary,
        invalid=invalid,
        doubts=doubts,
        notes=_run_notes(options, plan, collector, cache, sent),
        bound=None if cache is None or not cache.tokens else (cache.hits + collector.warm) / cache.tokens,
        block_size=None if cache is None else cache.block_size,
        counting=dict(sorted(collector.counting.items())),
        cpu_mean=cpu.mean,
        cpu_peak=cpu.peak,
        cpu_saturated=cpu.saturated_share,
        model=model,
        slo=slo,
        speed_up=options.speed_up,
        seed=options.seed,
        run=str(folder.path),
        skipped=0 if plan.trace is None else plan.trace.skipped,
    )


def _run_notes(
    options: BenchOptions, plan: BenchPlan, collector: _Collector, cache: InfiniteCache | None, sent: int
) -> list[str]:
    notes: list[str] = []
    if collector.counting.get("chunks"):
        notes.append(
            f"{counted(collector.counting['chunks'], 'stream')} without token counts: each chunk counts as one token"
        )
    if collector.inexact:
        notes.append(
            f"in {counted(collector.inexact, 'stream')} the chunks' tokens do not add up to the usage at the end"
        )
    reported = sum(record.cached is not None for record in collector.records)
    if sent and not reported:
        notes.append("the server tells no cached tokens in its usage: the hit rate is unknown")
    if collector.warm and cache is not None:
        notes.append(
            f"{collector.warm:,} prompt tokens were cached that no earlier prompt of this run had, from requests "
            "before it or from answers: the bound counts them"
        )
    if options.text:
        notes.append("no bound of an infinite cache: prompts are text, whose tokens only the server knows")
    elif cache is None:
        notes.append("no bound of an infinite cache: the server does not tell its block size; --block-size does")
    if plan.trace is not None:
        notes += trace_notes(plan.trace)
    failures = Counter(record.reason for record in collector.records if record.outcome in ("failed", "expired"))
    for reason, count in failures.most_common(3):
        notes.append(f"{count} x {reason}")
    return notes


@contextmanager
def _interruptible(generator: LoadGenerator) -> Iterator[list[int]]:
    """Let Ctrl-C end the sending, so that the measurement is still written; the list gets an entry for it."""
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def interrupt() -> None:
        signals.append(signal.SIGINT)
        generator.stop()

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield signals
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


def _config_yaml(options: BenchOptions, model: str) -> str:
    """Return the options as YAML, without the API key."""
    fields = {name: value for name, value in asdict(options).items() if name != "api_key"}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
    plain["model"] = model
    plain["token_range"] = list(options.token_range)
    return yaml.safe_dump({"bench": plain}, sort_keys=False)


def _header_number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return None
