"""Accuracy of a profile: a load on the live engine beside what a simulation from the profile alone predicts of it."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.config.files.profile_manifest import ProfileManifest, read_manifest
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.machine import SECOND
from penstock.kernel.request_record import RequestRecord, decode_records
from penstock.kernel.simulation import Simulation
from penstock.kernel.values import USUAL_LIMITS, RequestId
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.profiler.measurement.profile_run import utc_now
from penstock_lab.report.bench.bench_plan import BenchOptions
from penstock_lab.report.bench.bench_run import run as bench
from penstock_lab.report.run.run_summary import spread

BLOCK = 16
"""Tokens per block of the simulation: prompts share none, so that it hardly matters."""
PREDICTABLE = 0.15
"""Relative error of mean TTFT and mean TPOT up to which an engine counts as predictable."""
POINTS = ("mean", "p50", "p90", "p99")
HEAD = (
    "| date | model | GPU | engine | requests | TTFT, real ms | predicted | p90 | TPOT, real ms | predicted | p90 | |\n"
    "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|\n"
)


class LatencyError(msgspec.Struct, frozen=True, kw_only=True):
    """One latency in seconds, at `POINTS`."""

    name: str
    real: list[float]
    predicted: list[float]

    @property
    def errors(self) -> list[float]:
        """By what shares the prediction is above what was measured."""
        return [mine / theirs - 1.0 for theirs, mine in zip(self.real, self.predicted, strict=True)]


class ProfileAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile predicted of a later load, and what came."""

    manifest: ProfileManifest
    requests: int
    date: str
    ttft: LatencyError
    tpot: LatencyError

    @property
    def predictable(self) -> bool:
        return all(abs(each.errors[0]) <= PREDICTABLE for each in (self.ttft, self.tpot))

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        for each in (self.ttft, self.tpot):
            figures = [
                f"{point} {1e3 * real:.1f} ms, predicted {error:+.1%}"
                for point, real, error in zip(POINTS, each.real, each.errors, strict=True)
            ]
            yield f"{each.name}: {'; '.join(figures)}"
        if not self.predictable:
            yield f"No longer predictable: a mean is off by more than {PREDICTABLE:.0%}. Measure the engine again."

    def row(self) -> str:
        """Return it as a row of the ledger."""
        subject = self.manifest
        cells = [
            self.date[:10],
            subject.model,
            subject.gpu or "none",
            f"{subject.engine} {subject.engine_version or ''}",
        ]
        cells.append(str(self.requests))
        for each in (self.ttft, self.tpot):
            cells += [f"{1e3 * each.real[0]:.1f}", f"{each.errors[0]:+.1%}", f"{each.errors[2]:+.1%}"]
        cells.append("" if self.predictable else "no longer predictable")
        return f"| {' | '.join(cell.strip() for cell in cells)} |\n"


def measured_and_predicted(
    folder: Path,
    url: str,
    *,
    rate: float,
    requests: int,
    runs: Path,
    seed: int = 1,
    prompt: str | None = None,
    answer: str | None = None,
) -> ProfileAccuracy:
    """Load the engine at a URL with prompts that share nothing, and predict the same arrivals from a profile.

    Raises:
        ConfigError: the profile is of another model, or has too few points.
        EngineError: a request failed, so that the rest is no run to compare, or no answer has two tokens.
    """
    manifest = read_manifest(folder)
    options = BenchOptions(
        url=url,
        workload="fixed",
        model=manifest.model,
        rate=rate,
        requests=requests,
        prompt=prompt or f"{manifest.shape.isl:.0f}",
        answer=answer or f"{manifest.shape.osl:.0f}",
        out=runs,
        seed=seed,
        html=False,
    )
    outcome = asyncio.run(bench(options))
    with (Path(outcome.run) / "requests.jsonl").open("rb") as lines:
        records = sorted(decode_records(lines), key=lambda record: record.arrival)
    failed = [record for record in records if record.outcome != "ok"]
    if failed or not records:
        raise EngineError(f"{len(failed)} of {len(records)} requests failed: {failed[0].reason if failed else 'none'}")
    return compared(manifest, records, predict(folder, manifest, records))


def predict(folder: Path, manifest: ProfileManifest, records: Sequence[RequestRecord]) -> list[EngineFinished]:
    """Return what the simulated engine, timed by the profile alone, would have done with the same arrivals."""
    tp = size_predicted(manifest)
    limits = manifest.limits_of(tp).filled(USUAL_LIMITS)
    timing = TimingSettings(kind="table", profile=str(folder), tensor_parallel_size=tp)
    settings = SimSettings(
        block_size=BLOCK,
        kv_blocks=limits.kv_tokens // BLOCK,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs),
        timing=timing,
    )
    done: dict[str, EngineFinished] = {}

    def world(now: int, sender: str, effect: object) -> tuple[()]:
        if isinstance(effect, EngineFinished):
            done[effect.id] = effect
        return ()

    simulation = Simulation({"engine": Engine(settings, table=load_timing(timing))}, world)
    for number, record in enumerate(records):
        tokens = [number, *range(1, record.isl or 1)]  # prompts that share nothing, as those of the load
        submit = SubmitRequest(id=RequestId(str(number)), tokens=tokens, max_tokens=record.osl, ignore_eos=True)
        simulation.post(round(record.arrival * SECOND), "engine", submit)
    simulation.run()
    return [done[str(number)] for number in range(len(records))]


def size_predicted(manifest: ProfileManifest) -> int:
    """Return the size whose speed is predicted: the only one, or the one picked for decode.

    Raises:
        ConfigError: there are several, and none is picked.
    """
    if len(manifest.sizes) == 1:
        return manifest.sizes[0]
    if manifest.decode is None:
        raise ConfigError(
            f"the profile of {manifest.model} has several sizes and none picked", hint="measure it to the end"
        )
    return manifest.decode.tp


def compared(
    manifest: ProfileManifest, records: Sequence[RequestRecord], ends: Sequence[EngineFinished]
) -> ProfileAccuracy:
    """Return both runs beside each other; a client's TTFT has what a request costs beside its passes, too.

    Raises:
        EngineError: no answer has two tokens, so that nothing is known of the time between them.
    """
    tp = size_predicted(manifest)
    beside = max(0.0, manifest.host.request.get(tp, 0.0) - manifest.host.pass_gap.get(tp, 0.0))
    ttft = [(end.first - end.arrived) / SECOND + beside for end in ends if end.first is not None]
    tpot = [
        (end.at - end.first) / SECOND / (end.tokens - 1) for end in ends if end.first is not None and end.tokens > 1
    ]
    return ProfileAccuracy(
        manifest=manifest,
        requests=len(records),
        date=utc_now(),
        ttft=_latency_error("TTFT", [record.ttft for record in records], ttft),
        tpot=_latency_error("TPOT", [record.tpot for record in records], tpot),
    )


def note(ledger: Path, accuracy: ProfileAccuracy) -> None:
    """Add a row to the ledger; a file without its table gets the table's head at its end.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        before = ledger.read_text() if ledger.exists() else "# Accuracy ledger\n\n"
        at = before.find(HEAD)
        if at < 0:
            before, at = f"{before}{HEAD}", len(before)
        end = at + len(HEAD)
        while before.startswith("|", end):
            end = before.find("\n", end) + 1
        ledger.write_text(before[:end] + accuracy.row() + before[end:])
    except OSError as error:
        raise ConfigError(f"{ledger} can't be written: {error.strerror}") from error


def _latency_error(name: str, real: Sequence[float | None], predicted: Sequence[float]) -> LatencyError:
    sides = [spread(value for value in side if value is not None) for side in (real, predicted)]
    figures = [[getattr(side, point) for point in POINTS] for side in sides if side is not None]
    if len(figures) < len(sides):
        raise EngineError(f"no request has a {name}: answers of one token have no time between tokens")
    return LatencyError(name=name, real=figures[0], predicted=figures[1])
