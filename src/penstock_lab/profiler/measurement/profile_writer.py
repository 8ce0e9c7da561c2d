"""Folder of a profile: its manifest, its points, the tables that Dynamo's planners read, and its page."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.config.files.profile_manifest import (
    KV_KEY,
    MANIFEST,
    POINTS,
    Column,
    ProfileManifest,
    ProfilePoint,
    decode_table,
    prefill_table,
)
from penstock.kernel.errors import ConfigError, write_hint
from penstock.page.page_file import write_csv
from penstock.page.page_schema import Axis, Chart, KeyFigure, Mark, Page, PageNote, Section, series_of, text_table
from penstock_dynamo.profile_folder import DECODE_JSON, DECODE_NPZ, PREFILL_JSON, PREFILL_NPZ
from penstock_lab.profiler.measurement.recommendation import recommendation_lines

LATENCIES = (
    "TTFT: from sending a lone prompt, nothing of it cached, to its first token. ITL: mean gap between two output "
    "tokens, over tokens. TPOT: mean over requests of (last - first token) / (tokens - 1)."
)


def profile_page(manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> Page:
    """Return the page of a profile."""
    lines = recommendation_lines(manifest.prefill, manifest.decode) if manifest.source == "measured" else []
    picked = manifest.sizes[0] if manifest.decode is None else manifest.decode.tp
    return Page(
        title=f"Profile of {manifest.model}",
        about=f"{manifest.engine} {manifest.engine_version or ''} on {manifest.gpu or 'no known GPU'}, "
        f"{manifest.source}, {manifest.date}; {manifest.seconds:.0f} s, {manifest.gpu_seconds / 3600:.3f} GPU-hours",
        notes=[PageNote("warning", f"{text}") for text in lines if text.startswith("No ")],
        figures=[
            KeyFigure(f"{phase} TP", str(size.tp), f"{1e3 * size.seconds:.2f} ms" + ("" if size.met else ", misses"))
            for phase, size in (("prefill", manifest.prefill), ("decode", manifest.decode))
            if size is not None
        ],
        sections=[
            Section("Prefill", [LATENCIES, *lines], _prefill_charts(manifest, points), files=["points.csv"]),
            Section(f"Decode, TP {picked}", [], _decode_charts(manifest, points, picked), files=["points.csv"]),
            Section(
                "Costs beside the passes", tables=[text_table("seconds", ("what", "ms"), _cost_rows(manifest, points))]
            ),
            Section("Not known", [*manifest.left_out, *unseen(manifest, points)]),
        ],
    )


def _prefill_charts(manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> list[Chart]:
    by_size = [
        (tp, sorted((p for p in points if p.kind == "prefill" and p.tp == tp), key=lambda p: p.tokens))
        for tp in manifest.sizes
    ]
    ttft = [series_of(f"TP {tp}", [(p.tokens, p.mean) for p in mine]) for tp, mine in by_size if mine]
    rate = [series_of(f"TP {tp}", [(p.tokens, p.tokens / p.mean / tp) for p in mine]) for tp, mine in by_size if mine]
    x = Axis("prompt tokens")
    return [
        Chart("TTFT", ttft, "seconds", x, Axis(unit="seconds"), marks=_slo_marks("TTFT SLO", manifest.slo.ttft)),
        Chart("Prefill throughput per GPU", rate, "tokens/s/GPU", x, Axis()),
    ]


def _decode_charts(manifest: ProfileManifest, points: Sequence[ProfilePoint], tp: int) -> list[Chart]:
    mine = [point for point in points if point.kind == "decode" and point.tp == tp]
    room = manifest.limits_of(tp).kv_tokens
    itl, rate, over_kv = [], [], []
    for context in sorted({round(point.context, -1) for point in mine}):
        row = sorted((p for p in mine if round(p.context, -1) == context), key=lambda p: p.seqs)
        name = f"{context:,.0f} tokens"
        itl.append(series_of(name, [(p.seqs, p.mean) for p in row]))
        rate.append(series_of(name, [(p.seqs, p.seqs / p.mean / tp) for p in row]))
        if room:
            over_kv.append(series_of(name, [(p.seqs * p.context / room, p.mean) for p in row]))
    marks, flight = _slo_marks("ITL SLO", manifest.slo.itl), Axis("requests in flight")
    kv = Axis("KV use", "share")
    return [
        Chart("ITL by context and requests in flight", itl, "seconds", flight, Axis(unit="seconds"), marks=marks),
        Chart("ITL by context and KV use", over_kv, "seconds", kv, Axis(unit="seconds"), marks=marks),
        Chart("Decode throughput per GPU", rate, "tokens/s/GPU", flight, Axis()),
    ]


def _slo_marks(name: str, seconds: float | None) -> list[Mark]:
    return [] if seconds is None else [Mark(name, seconds, "y")]


def _cost_rows(manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> Iterable[Sequence[str]]:
    host = manifest.host
    for tp in manifest.sizes:
        for what, known in (("gap between decode passes", host.pass_gap), ("request beside its passes", host.request)):
            yield f"{what}, TP {tp}", f"{1e3 * known[tp]:.3f}" if tp in known else "unknown: the engine can't be asked"
    several = host.collectives
    yield (
        "collectives of a decode pass",
        "unknown: it takes three sizes with TP 1" if several is None else f"{1e3 * several:.3f}",
    )
    for point in points:
        if point.kind in ("cold_start", "warm_start", "transfer"):
            what = point.kind.replace("_", " ") + (f" of {point.tokens:,} tokens" if point.tokens else "")
            yield f"{what}, TP {point.tp}", f"{1e3 * point.mean:.1f}"


def unseen(manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> list[str]:
    """Return in sentences where a profile has no points although the engine goes there."""
    texts = []
    for tp in manifest.sizes:
        limits = manifest.limits_of(tp)
        prompts = [point.tokens for point in points if point.kind == "prefill" and point.tp == tp]
        decode = [point for point in points if point.kind == "decode" and point.tp == tp]
        if not prompts:
            texts.append(f"TP {tp}: no lone prompt was seen.")
        elif limits.max_model_len is not None and max(prompts) < 0.9 * limits.max_model_len:
            texts.append(f"TP {tp}: prompts of {max(prompts):,} to {limits.max_model_len:,} tokens were not seen.")
        if not decode:
            texts.append(f"TP {tp}: no pass that only decodes was seen.")
            continue
        most, fullest = max(p.seqs for p in decode), max(p.seqs * p.context for p in decode)
        if limits.max_num_seqs is not None and most < limits.max_num_seqs:
            texts.append(f"TP {tp}: more than {most:,} sequences in flight were not seen.")
        if limits.kv_tokens is not None and fullest < 0.9 * limits.kv_tokens:
            texts.append(f"TP {tp}: KV use above {fullest / limits.kv_tokens:.0%} was not seen.")
    return texts


def write_profile(folder: Path, manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> None:
    """Write a profile; the manifest last, so that a folder with one is whole.

    Raises:
        ConfigError: the folder can't be written.
    """
    names = ProfilePoint.__struct_fields__
    try:
        folder.mkdir(parents=True, exist_ok=True)
        columns: dict[str, Column] = {name: _saved_column([getattr(point, name) for point in points]) for name in names}
        np.savez_compressed(folder / POINTS, **columns)  # type: ignore[arg-type]
        rows = [[getattr(point, name) for name in names] for point in points]
        write_csv(folder / "points.csv", names, [["" if cell is None else cell for cell in row] for row in rows])
        _write_table(folder, PREFILL_NPZ, PREFILL_JSON, prefill_table(manifest, points))
        _write_table(folder, DECODE_NPZ, DECODE_JSON, decode_table(manifest, points))
        fresh = folder / f"{MANIFEST}.new"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        fresh.replace(folder / MANIFEST)
    except OSError as error:
        hint = write_hint(error, "give another --out")
        raise ConfigError(f"profile {folder} can't be written: {error.strerror}", hint=hint) from error


def _write_table(folder: Path, npz: str, plain: str, table: Mapping[str, Column]) -> None:
    path = folder / npz
    if not table:
        path.unlink(missing_ok=True)  # of an earlier run in this folder
        (folder / plain).unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **table)  # type: ignore[arg-type]
    lists = {name: column.tolist() if name != KV_KEY else column.tolist()[0] for name, column in table.items()}
    (folder / plain).write_text(json.dumps(lists) + "\n")


def _saved_column(values: Sequence[str | float | None]) -> Column:
    """Return a column; an unknown number is NaN."""
    if any(value is None for value in values):
        return np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)
    return np.asarray(values)
