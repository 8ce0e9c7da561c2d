"""Profile of `penstock profile`: its manifest and its points in a folder, and the timing table that they make.

A folder has ``profile.json`` (the manifest) and ``points.npz`` (one array per column of `ProfilePoint`), beside the
files of `penstock_dynamo.profile_folder`, which other planners read too. Times are seconds here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config.files.data_files import npz_arrays
from penstock.kernel.errors import ConfigError, read_hint
from penstock.kernel.values import UNKNOWN_LIMITS, EngineLimits, RequestShape, Slo
from penstock.planner.performance.benchmark_table import BenchmarkTable

MANIFEST, POINTS = "profile.json", "points.npz"
VERSION = 1
KV_KEY = "max_kv_tokens"
"""Key of the cache's tokens in Dynamo's decode table."""
GRID = 40
"""KV sizes of the decode table that a simulated engine looks up, each a like factor above the one before."""

Column = npt.NDArray[np.generic]
PointKind = Literal["prefill", "decode", "mixed", "cold_start", "warm_start", "transfer"]


class ProfilePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measured point.

    prefill: TTFT of a lone prompt of ``tokens``, nothing cached. decode: ITL of ``seqs`` sequences of ``context``
    tokens each. mixed: a pass that computes ``tokens`` of a prompt beside such sequences. transfer: what it adds to
    TTFT to take the KV of ``tokens`` from another engine. Starts: from the command to the first answer.

    Args:
        mean, sd: seconds, over ``repeats`` measurements without ``outliers``.
        inside: seconds that the engine itself says its passes took; None where it can't be asked.
        tpot: mean over requests, where ``mean`` is the mean over tokens; None except for decode.
    """

    kind: PointKind
    tp: int = 1
    tokens: int = 0
    seqs: int = 0
    context: float = 0.0
    mean: float
    sd: float = 0.0
    repeats: int = 1
    outliers: int = 0
    inside: float | None = None
    tpot: float | None = None


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What passes cost beside the GPU's work, in seconds; None where no engine could be asked.

    Args:
        pass_gap: between two decode passes, by tensor-parallel size: ITL less what the engine says of the pass.
        request: of one request, such as HTTP and tokens: TTFT less the passes of its prompt.
        collectives: of all exchanges of a decode pass: what stays of passes over sizes 1, 2, 4 ... beside a fixed
            part and a part that is divided by the size.
    """

    pass_gap: dict[int, float] = {}
    request: dict[int, float] = {}
    collectives: float | None = None


class PickedSize(msgspec.Struct, frozen=True, kw_only=True):
    """The tensor-parallel size of one phase. ``seconds``: TTFT or ITL; ``per_gpu``: tokens per second and GPU;
    ``seqs``: in flight; ``upper``, ``lower``: bounds for the planner; ``needs``: what a missed SLA would need."""

    tp: int
    seconds: float
    per_gpu: float
    seqs: int
    met: bool
    upper: float
    lower: float
    needs: str = ""


class ProfileManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what, and what came of it.

    Args:
        engine: kind of engine; ``flags``: its command line, or its settings.
        gpu: name, None where it is not known; ``links``: what nvidia-smi says joins two of them.
        limits: of the engine, by tensor-parallel size.
        shape, slo: the traffic and the service level that sizes were picked for.
        seconds, gpu_seconds: what the measurement cost.
        left_out: points that were not measured, and why; nothing is known there.
    """

    version: int = VERSION
    source: Literal["measured", "production"] = "measured"
    model: str
    engine: str
    engine_version: str | None = None
    flags: list[str] = []
    gpu: str | None = None
    gpu_memory_mib: int | None = None
    gpu_count: int = 0
    links: str | None = None
    sizes: tuple[int, ...] = (1,)
    limits: dict[int, EngineLimits[int | None]] = {}
    shape: RequestShape[float] = RequestShape(3000.0, 150.0)
    slo: Slo = Slo()
    date: str = ""
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    prefill: PickedSize | None = None
    decode: PickedSize | None = None
    host: HostCosts = HostCosts()
    left_out: list[str] = []

    def limits_of(self, tp: int) -> EngineLimits[int | None]:
        return self.limits.get(tp, UNKNOWN_LIMITS)


class MeasuredProfile(NamedTuple):
    """A profile folder, as read."""

    manifest: ProfileManifest
    points: list[ProfilePoint]


def has_manifest(folder: str | Path) -> bool:
    """Return whether a folder is one of `penstock profile`, and not another's profile."""
    return (Path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> ProfileManifest:
    """Return the manifest of a profile folder.

    Raises:
        ConfigError: it is not there, or not as it must be.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=ProfileManifest)
    except OSError as error:
        hint = read_hint(error, "make it by penstock profile")
        raise ConfigError(f"profile {path} can't be read: {error.strerror}", hint=hint) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"profile {path}: {error}", hint="make it again by penstock profile") from error
    if manifest.version > VERSION:
        raise ConfigError(f"profile {path} has version {manifest.version}", hint="read it with a newer penstock")
    return manifest


def read_measured(folder: str | Path) -> MeasuredProfile:
    """Return a profile folder with its points.

    Raises:
        ConfigError: a file is not there, or not as it must be.
    """
    path = Path(folder) / POINTS
    manifest, columns = read_manifest(folder), npz_arrays(path, f"profile {path}")
    try:
        names = [name for name in ProfilePoint.__struct_fields__ if name in columns]
        rows = zip(*(columns[name].tolist() for name in names), strict=True)
        # An absent number is NaN in a column.
        known = [{name: v for name, v in zip(names, row, strict=True) if v == v} for row in rows]
        return MeasuredProfile(manifest, msgspec.convert(known, list[ProfilePoint]))
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"profile {path}: {error}", hint="make it again by penstock profile") from error


def check_profile(folder: str | Path, model: str, engine: str | None = None) -> None:
    """Raise `ConfigError` where a profile is of another model or engine; others' profiles do not say what they are of.

    Args:
        model: a path or a hub id counts by its last part, a config.json by its folder's.
        engine: its kind; None where any may be meant.
    """
    if not has_manifest(folder):
        return
    manifest = read_manifest(folder)
    for what, mine, wanted in (
        ("model", _plain_model_name(manifest.model), _plain_model_name(model)),
        ("engine", manifest.engine, engine or manifest.engine),
    ):
        if mine != wanted:
            raise ConfigError(
                f"profile {folder} is of {what} {mine}, not of {wanted}", hint="measure it with penstock profile"
            )


def sizes_measured(points: Sequence[ProfilePoint]) -> list[int]:
    """Return the tensor-parallel sizes whose passes were measured."""
    return sorted({point.tp for point in points if point.kind in ("prefill", "decode")})


def check_size(folder: str | Path, tp: int, sizes: Sequence[int]) -> None:
    """Raise `ConfigError` where a profile has no curves of a tensor-parallel size: those of another one are not its."""
    if tp not in sizes:
        raise ConfigError(
            f"tensor_parallel_size is {tp}; profile {folder} has {', '.join(map(str, sizes)) or 'no points'}",
            hint="measure it with penstock profile --tp; where others start the engines, set labels: {tp_size: N}",
        )


def prefill_table(
    manifest: ProfileManifest, points: Sequence[ProfilePoint], tp: int | None = None
) -> Mapping[str, Column]:
    """Return Dynamo's prefill table of a size: tokens, milliseconds, tokens/s/GPU; empty where nothing is known.

    Args:
        tp: None takes the picked one.
    """
    if tp is None:
        tp = manifest.sizes[0] if manifest.prefill is None else manifest.prefill.tp
    mine = sorted((p for p in points if p.kind == "prefill" and p.tp == tp), key=lambda p: p.tokens)
    if not mine:
        return {}
    isl = np.asarray([point.tokens for point in mine])
    seconds = np.asarray([point.mean for point in mine])
    return {"prefill_isl": isl, "prefill_ttft": 1e3 * seconds, "prefill_thpt_per_gpu": isl / seconds / tp}


def decode_table(
    manifest: ProfileManifest, points: Sequence[ProfilePoint], tp: int | None = None
) -> Mapping[str, Column]:
    """Return Dynamo's decode table of a size: KV use 0..1, tokens, milliseconds, tokens/s/GPU, and the cache's tokens.

    It is empty where the engine does not say how many tokens its cache holds.

    Args:
        tp: None takes the picked one.
    """
    if tp is None:
        tp = manifest.sizes[0] if manifest.decode is None else manifest.decode.tp
    room = manifest.limits_of(tp).kv_tokens
    mine = sorted((p for p in points if p.kind == "decode" and p.tp == tp), key=lambda p: (p.context, p.seqs))
    if not mine or not room:
        return {}
    seqs, context, seconds = (np.asarray([getattr(p, name) for p in mine]) for name in ("seqs", "context", "mean"))
    return {
        "x_kv_usage": np.minimum(1.0, seqs * context / room),
        "y_context_length": context,
        "z_itl": 1e3 * seconds,
        "z_thpt_per_gpu": seqs / seconds / tp,
        KV_KEY: np.asarray([room]),
    }


def timing_table(folder: str | Path, tp: int) -> Mapping[str, Any]:
    """Return the table that timing of kind table takes, from a profile folder of ours.

    Raises:
        ConfigError: the size was not measured, or prefill or decode is missing.
    """
    manifest, points = read_measured(folder)
    check_size(folder, tp, sizes_measured(points))
    mine = [point for point in points if point.tp == tp]
    gap = manifest.host.pass_gap.get(tp, 0.0)
    # What a request costs beside its passes keeps the engine from no other: where the passes are known, they count.
    prefill = [
        (float(each.tokens), each.mean if each.inside is None else min(each.mean, each.inside + gap))
        for each in mine
        if each.kind == "prefill"
    ]
    decode = [(float(each.seqs), each.seqs * each.context, each.mean) for each in mine if each.kind == "decode"]
    table = grid_of(prefill, decode, str(folder))
    if (request := manifest.host.request.get(tp)) is not None:
        table["request_overhead"] = np.float64(max(0.0, request - gap))
    if mixed := [each for each in mine if each.kind == "mixed"]:
        model = BenchmarkTable(prefill, decode)
        # Both parts read the weights and pay for the host; a mixed pass does so once.
        saved = [float(model.mixed(e.tokens, e.seqs, e.seqs * e.context)) - e.mean for e in mixed]
        table["mixed_saving_ms"] = np.float64(1e3 * max(0.0, float(np.median(saved))))
    return table


def grid_of(
    prefill: Sequence[tuple[float, float]], decode: Sequence[tuple[float, float, float]], source: str
) -> dict[str, Any]:
    """Return points as the grid of a timing table: (tokens, seconds) and (sequences, KV tokens, seconds)."""
    if len({tokens for tokens, _ in prefill}) < 2 or len({kv for _, kv, _ in decode}) < 2:
        raise ConfigError(
            f"profile {source} has fewer than two points of prefill or of decode",
            hint="measure both, with more time, by penstock profile",
        )
    model = BenchmarkTable(prefill, decode, source=source)
    contexts = [kv / seqs for seqs, kv, _ in decode]
    tokens = np.unique([tokens for tokens, _ in prefill])
    kv = np.geomspace(min(contexts), max(kv for _, kv, _ in decode), GRID)
    seqs = np.unique([seqs for seqs, _, _ in decode])
    if len(seqs) < 2:
        seqs = np.append(seqs, seqs[-1] + 1.0)
    return {
        "prefill_isl": tokens,
        "prefill_ttft_ms": 1e3 * model.prefill(tokens),
        "decode_active_kv_tokens": kv,
        "decode_seqs": seqs,
        "decode_itl": 1e3 * np.maximum(1e-6, model.decode(seqs[None, :], kv[:, None])),
    }


def _plain_model_name(model: str) -> str:
    return model.removesuffix("config.json").rstrip("/").rsplit("/", 1)[-1].lower()
