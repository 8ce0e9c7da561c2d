"""Is the roofline good enough to choose deployments by? Fits half of the measured points, is judged by the rest.

usage: python bench/roofline/proof.py [--fit FILE] [--docs docs/bench/timing-proof.md]

Points are looked for as bench/roofline/run.py does; without them the command ends with status 77. aiconfigurator is
taken from $PEERS/aic, an environment with aiconfigurator-core for this interpreter's version of Python; without it its
table is left out, and the command says so. It takes some two minutes.
"""

import csv
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from closed_loop import closed_loop
from points import Point, points_of, shape_named, weights_of
from run import ABSENT, Fitted, fitted, parse
from table import as_setting, beside_of

from penstock.kernel.errors import ConfigError
from penstock_lab.config.aiconfigurator_timing import predicted_profile
from penstock_lab.engine.settings import Calibration, TimingSettings
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.operators import OperatorTiming
from penstock_lab.engine.timing.roofline import Roofline, work_of
from penstock_lab.report.markdown import write_part

SLOS_MS = (10.0, 20.0, 30.0, 50.0, 100.0)
"""TPOT that a deployment must keep."""
WITHIN = 0.1
"""A choice is good whose measured throughput is at most this share below the best one's."""
FEWEST = 5
"""Points that a ranking takes at least."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One point of the half that was not fitted to: (TPOT s, TTFT s, tokens/s per GPU), measured and predicted."""

    point: Point
    measured: tuple[float, float, float]
    predicted: tuple[float, float, float]

    @classmethod
    def of(cls, point: Point, tpot: float, ttft: float) -> "Judged":
        given = point.measured
        told = (given.tpot, given.ttft or 0.0)
        return cls(point, (*told, _throughput(point, *told)), (tpot, ttft, _throughput(point, tpot, ttft)))

    def error(self, which: int) -> float:
        return abs(self.predicted[which] / self.measured[which] - 1.0)

    @property
    def place(self) -> tuple[str, str, str]:
        """Model, GPU and lengths: configurations of one place are alternatives to each other."""
        request = self.point.measured.request
        return self.point.model, self.point.group[1], f"{request.isl}/{request.osl}"


def _throughput(point: Point, tpot: float, ttft: float) -> float:
    given = point.measured
    gpus = max(given.tensor_parallel_size, given.expert_parallel_size)
    return given.concurrency * given.request.osl / (ttft + (given.request.osl - 1) * tpot) / gpus


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.fit.is_file():
        print(f"no measured points at {options.fit}: set PENSTOCK_TRACES or --fit", file=sys.stderr)
        return ABSENT
    lines = options.fit.read_text().splitlines()
    points, left_out = points_of(lines)
    found = fitted(points[::2])
    calibration = found.calibration
    rows = [_judged(point, found) for point in points[1::2]]
    unseen, told = _left_out(points)
    text = [
        f"{len(points):,} points; fitted on every second one, judged by the other {len(rows)}. Not used are "
        + ", ".join(f"{count} ({why})" for why, count in left_out.items())
        + ".",
        f"Fitted: {as_setting(calibration)}; milliseconds of a request beside its passes: {beside_of(found.beside)}.",
        "## Goals",
        *_goals(rows, unseen),
        "## Models left out",
        "Each model is predicted with constants that were fitted to the other three.",
        told,
        "## Errors",
        _errors(rows),
        "## Ranking of configurations",
        _ranking(rows),
        "## Chosen deployments",
        _choices(rows),
        "## Disaggregated rows",
        _disaggregated(lines, calibration),
        "## Beside aiconfigurator",
        _beside_peer(rows),
    ]
    page = "\n\n".join(text)
    print(page)
    if options.docs is not None:
        write_part(options.docs, page)
    return 0


def _judged(point: Point, found: Fitted) -> Judged:
    looped = found.looped(point)
    return Judged.of(point, looped.tpot, looped.ttft)


def _left_out(points: Sequence[Point]) -> tuple[list[Judged], str]:
    """Judge each model by constants that were fitted without it."""
    rows: list[Judged] = []
    for model in sorted({point.model for point in points}):
        found = fitted([point for point in points if point.model != model])
        rows += [_judged(point, found) for point in points if point.model == model]
    groups = {f"{model}, {engine}": mine for (model, engine), mine in _by(rows, _engine_of).items()}
    groups |= {f"all {model}": mine for model, mine in _by(rows, lambda row: row.point.model).items()}
    groups |= {f"all {engine}": mine for engine, mine in _by(rows, lambda row: row.point.group[0]).items()}
    groups["all"] = rows
    cells = []
    for name, mine in groups.items():
        line = [name, str(len(mine))]
        for which in range(2):
            signed = [row.predicted[which] / row.measured[which] - 1.0 for row in mine]
            line.append(f"{median(map(abs, signed)):.1%} ({median(signed):+.0%})")
        cells.append(line)
    return rows, _table(["model, engine", "points", "TPOT median", "TTFT median"], cells)


def _engine_of(row: Judged) -> tuple[str, str]:
    return row.point.model, row.point.group[0]


# --- tables ----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _goals(rows: Sequence[Judged], unseen: Sequence[Judged]) -> list[str]:
    tpot = median(row.error(0) for row in rows)
    ranks = {model: spearman(mine, 2) for model, mine in _by(rows, lambda row: row.point.model).items()}
    share = _good_share(rows)
    goals = (
        ("median error of TPOT under 15 %", tpot < 0.15, f"{tpot:.1%}"),
        *(
            (f"median error of {name} on models left out under {most:.0%}", error < most, f"{error:.1%}")
            for name, most, error in (
                ("TPOT", 0.15, median(row.error(0) for row in unseen)),
                ("TTFT", 0.35, median(row.error(1) for row in unseen)),
            )
        ),
        (
            "Spearman of configurations per model above 0.9",
            min(ranks.values()) > 0.9,
            ", ".join(f"{model} {rank:.3f}" for model, rank in ranks.items()),
        ),
        ("every chosen deployment within 10 % of the best", share == 1.0, f"{share:.0%} of the choices are"),
    )
    return [_table(["goal", "kept", "value"], [[what, "yes" if kept else "NO", value] for what, kept, value in goals])]


def _errors(rows: Sequence[Judged]) -> str:
    groups = {" ".join(name): mine for name, mine in _by(rows, lambda row: row.point.group).items()}
    groups |= {f"all {model}": mine for model, mine in _by(rows, lambda row: row.point.model).items()}
    groups["all"] = list(rows)
    names = ("TPOT", "TTFT", "tokens/s/GPU")
    head = ["group", "points", *(f"{name} {kind}" for name in names for kind in ("median", "mean"))]
    cells = []
    for name, mine in groups.items():
        errors = [[row.error(which) for row in mine] for which in range(3)]
        cells.append([name, str(len(mine)), *(f"{kind(each):.1%}" for each in errors for kind in (median, mean))])
    return _table(head, cells)


def _ranking(rows: Sequence[Judged]) -> str:
    cells = []
    for model, mine in _by(rows, lambda row: row.point.model).items():
        ranks = [spearman(one, 2) for one in _by(mine, lambda row: row.place).values() if len(one) >= FEWEST]
        cells.append(
            [
                model,
                str(len(mine)),
                f"{spearman(mine, 2):.3f}",
                f"{spearman(mine, 0):.3f}",
                f"{median(ranks):.3f}",
                f"{min(ranks):.3f}",
            ]
        )
    head = ["model", "points", "tokens/s/GPU", "TPOT", "of one GPU and length, median", "the worst of those"]
    return _table(head, cells)


def spearman(rows: Sequence[Judged], which: int) -> float:
    """Return the correlation of ranks; equal values share theirs."""
    return rank_correlation([row.measured[which] for row in rows], [row.predicted[which] for row in rows])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = []
    for values in (one, other):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(ranks)[0, 1])


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen among the alternatives of one place under one SLO, and the best there was."""

    place: tuple[str, str, str]
    slo_ms: float
    lost: float
    """Share of the best one's measured throughput that the choice lacks."""
    tpot_ms: float

    @property
    def good(self) -> bool:
        return self.lost <= WITHIN and self.tpot_ms <= self.slo_ms * (1.0 + WITHIN)


def choices(rows: Sequence[Judged]) -> list[Choice]:
    """Choose, for every place and SLO that some point keeps, the point with the most predicted tokens/s per GPU."""
    made = []
    for place, mine in _by(rows, lambda row: row.place).items():
        for slo in SLOS_MS if len(mine) >= FEWEST else ():
            able = [row for row in mine if row.measured[0] * 1e3 <= slo]
            allowed = [row for row in mine if row.predicted[0] * 1e3 <= slo] or [
                min(mine, key=lambda row: row.predicted[0])
            ]
            if able:
                best = max(row.measured[2] for row in able)
                chosen = max(allowed, key=lambda row: row.predicted[2])
                made.append(Choice(place, slo, 1.0 - chosen.measured[2] / best, chosen.measured[0] * 1e3))
    return made


def _good_share(rows: Sequence[Judged]) -> float:
    return mean(choice.good for choice in choices(rows))


def _choices(rows: Sequence[Judged]) -> str:
    cells = []
    for (model, gpu), mine in _by(choices(rows), lambda choice: choice.place[:2]).items():
        late = sum(choice.tpot_ms > choice.slo_ms * (1.0 + WITHIN) for choice in mine)
        lost = [max(0.0, choice.lost) for choice in mine]
        good = sum(choice.good for choice in mine)
        cells.append([model, gpu, str(len(mine)), str(good), str(late), f"{median(lost):.1%}", f"{max(lost):.1%}"])
    head = ["model", "GPU", "choices", "good", "over the SLO by a tenth", "throughput lost, median", "most"]
    return _table(head, cells)


def _by(rows: Iterable[object], key: Callable[..., object]) -> dict[object, list]:  # type: ignore[type-arg]
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(sorted(groups.items()))


# --- disaggregated rows ----------------------------------------------------------------------------------------------


def _disaggregated(lines: Sequence[str], calibration: Calibration) -> str:
    """Rank decode engines by their predicted steps: how many there were is known of 8 rows, and taken as one else."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    errors, unknown = [], 0
    for row in csv.DictReader(lines):
        if row["mode"] == "agg":
            continue
        told, shape = re.search(r"_c(\d+)_", row["id"]), shape_named(row["model_path"])
        gpu = GPUS.get(row["system"].removesuffix("_sxm"))
        if shape is None or gpu is None or not (told or row["decode_batch_size"]):
            unknown += 1
            continue
        tensor, experts = int(row["decode_tp_size"]), int(row["decode_moe_ep_size"] or 1)
        replicas = int(row["decode_attention_dp_size"] or 1)
        batch = int(row["decode_batch_size"] or 0) * replicas or int(told.group(1))  # type: ignore[union-attr]
        weights = None if shape[1].expert_dtype == "mxfp4" else weights_of(row["gemm_quant_mode"])
        try:
            roofline = Roofline(
                shape[1],
                gpu,
                calibration,
                tensor_parallel_size=tensor,
                expert_parallel_size=experts * replicas if shape[1].experts and experts > 1 else 1,
                weight_dtype=weights,
                kv_cache_dtype="fp8",
            )
        except ConfigError:
            unknown += 1
            continue
        length = int(row["isl"]) + int(row["osl"]) // 2
        step = roofline.seconds(work_of((), batch * length, batch, shape[1].window)) * 1e3
        measured = float(row["silicon_tpot_ms"])
        found[shape[0]].append((measured, step))
        if row["decode_batch_size"]:
            errors.append(abs(step / measured - 1.0))
    cells = [
        [model, str(len(pairs)), f"{rank_correlation(*zip(*pairs, strict=True)):.3f}"]
        for model, pairs in found.items()
        if len(pairs) >= FEWEST
    ]
    known = f"{len(errors)} rows say how many sequences decode at once: the median error of their TPOT is "
    return "\n\n".join(
        [
            f"{known}{median(errors):.1%}. {unknown} rows can't be ranked: GPUs that don't divide the heads, or no "
            "concurrency in the name.",
            _table(["model", "rows", "Spearman of TPOT"], cells),
        ]
    )


# --- aiconfigurator --------------------------------------------------------------------------------------------------


def _beside_peer(rows: Sequence[Judged]) -> str:
    """Hold both to the vLLM rows that both can answer: the same closed loop, with aiconfigurator's passes in it."""
    peers = os.environ.get("PEERS")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = Path(peers, "aic", "lib", version, "site-packages") if peers else None
    if site is None or not (site / "aiconfigurator_core").is_dir():
        return "Left out: PEERS names no folder with aic/ and aiconfigurator-core for this Python in it."
    sys.path.append(str(site))
    profiles: dict[TimingSettings, OperatorTiming | str] = {}
    both: list[tuple[Judged, Judged]] = []
    refused = 0
    for row in rows:
        if row.point.group[0] != "vllm":
            continue
        settings = _settings_of(row.point)
        if settings not in profiles:
            try:
                profiles[settings] = OperatorTiming(predicted_profile(settings), None, None, settings)
            except ConfigError as error:
                profiles[settings] = str(error)
                print(error, file=sys.stderr)
        timing = profiles[settings]
        if isinstance(timing, str):
            refused += 1
            continue
        looped = closed_loop(row.point, Calibration(), timing)
        both.append((row, Judged.of(row.point, looped.tpot, looped.ttft)))
    if not both:
        return f"aiconfigurator could answer none of {refused} rows of vLLM."
    cells = []
    for model, mine in _by(both, lambda pair: pair[0].point.model).items():
        for name, which in (("roofline", 0), ("aiconfigurator", 1)):
            own = [pair[which] for pair in mine]
            errors = [[row.error(number) for row in own] for number in range(3)]
            cells.append(
                [str(model), str(len(own)), name, *(f"{kind(each):.1%}" for each in errors for kind in (median, mean)),
                 f"{spearman(own, 2):.3f}"]
            )  # fmt: skip
    names = ("TPOT", "TTFT", "tokens/s/GPU")
    head = ["model", "rows", "by", *(f"{name} {kind}" for name in names for kind in ("median", "mean")), "Spearman"]
    text = (
        f"{len(both)} rows of vLLM that both can answer; aiconfigurator refused {refused}. Its newest kernels are used."
    )
    return f"{text}\n\n{_table(head, cells)}"


def _settings_of(point: Point) -> TimingSettings:
    given = point.measured
    names = {"Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B", "Qwen3-32B": "Qwen/Qwen3-32B"}
    names |= {"gpt-oss-120b": "openai/gpt-oss-120b", "DeepSeek-R1": "deepseek-ai/DeepSeek-R1"}
    return TimingSettings(
        kind="aiconfigurator",
        model=names[point.model],
        gpu=point.group[1],
        tensor_parallel_size=given.tensor_parallel_size,
        expert_parallel_size=given.expert_parallel_size,
        weight_dtype=given.weight_dtype,
        kv_cache_dtype=given.kv_cache_dtype,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
