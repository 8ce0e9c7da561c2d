"""Sources of performance models: the first one available, in order of how well it knows the engine.

In Dynamo's order: the worker's own measurement, aiconfigurator's prediction, the profile in a folder, the
passes observed live, a roofline. Data that is read or computed elsewhere comes here as plain data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Role
from penstock.planner.performance.benchmark_table import BenchmarkTable
from penstock.planner.performance.interpolators import DecodeInterpolator, PrefillInterpolator
from penstock.planner.performance.live_regression import LiveRegression
from penstock.planner.performance.performance_model import PerformanceModel

SourceName = Literal["self-benchmark", "aiconfigurator", "profile", "live", "roofline"]
ORDER: tuple[SourceName, ...] = ("self-benchmark", "aiconfigurator", "profile", "live", "roofline")
"""Dynamo has no roofline; it comes last, for engines without an observed pass."""
PROFILE_CONTEXTS, PROFILE_BATCHES = 8, 8
"""Points of a profile that is made from a benchmark."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep of one configuration, as `penstock_dynamo.profile_folder` reads it. Tokens, seconds, tokens/s/GPU.

    Args:
        prefill_isl, prefill_ttft, prefill_per_gpu: shape (n,).
        usage, context, itl, decode_per_gpu: shape (m,); ``usage`` 0..1 of ``kv_tokens``.
    """

    prefill_isl: Sequence[float] = ()
    prefill_ttft: Sequence[float] = ()
    prefill_per_gpu: Sequence[float] = ()
    usage: Sequence[float] = ()
    context: Sequence[float] = ()
    itl: Sequence[float] = ()
    decode_per_gpu: Sequence[float] = ()
    kv_tokens: int = 0

    def prefill(self) -> PrefillInterpolator | None:
        """Return its curves of prefill; None where it has none."""
        if not len(self.prefill_isl):
            return None
        return PrefillInterpolator(self.prefill_isl, self.prefill_ttft, self.prefill_per_gpu)

    def decode(self) -> DecodeInterpolator | None:
        """Return its curves of decode; None where it has none."""
        if not len(self.usage):
            return None
        return DecodeInterpolator(self.usage, self.context, self.itl, self.decode_per_gpu, self.kv_tokens)

    def metrics(self) -> dict[str, Any]:
        """Return the profile in the form of a worker's own benchmark: lone prompts, and passes of so many sequences.

        A point of fill level u and context c is a pass of ``max(1, round(u x room / c))`` sequences.
        """
        decode = []
        for usage, context, itl in zip(self.usage, self.context, self.itl, strict=True):
            kv = round(float(usage) * self.kv_tokens)
            decode.append({"batch": max(1, round(kv / float(context))), "kv_tokens": kv, "seconds": float(itl)})
        prefill = [
            {"tokens": float(isl), "seconds": float(ttft)}
            for isl, ttft in zip(self.prefill_isl, self.prefill_ttft, strict=True)
        ]
        return {"unit": "seconds", "prefill": prefill, "decode": decode}


@dataclass(frozen=True, slots=True)
class KnownSpeeds:
    """Known speeds of one kind of engine before it serves.

    Args:
        metrics: by source, points as `penstock_lab.engine.self_benchmark.perf_metrics` gives them.
        profile: of a folder; its points count as metrics of source ``profile``.
        why_not: by source, why it is missing, for display.
    """

    metrics: Mapping[SourceName, Mapping[str, Any]] = field(default_factory=dict)
    profile: Profile | None = None
    why_not: Mapping[SourceName, str] = field(default_factory=dict)

    def points(self, name: SourceName) -> Mapping[str, Any] | None:
        """Return a source's points; None where it is missing."""
        if name == "profile" and name not in self.metrics and self.profile is not None:
            return self.profile.metrics()
        return self.metrics.get(name)


class PickedModel(NamedTuple):
    """The model in use. ``source``: its name in `ORDER`; ``passed``: those before it and why they were not used."""

    model: PerformanceModel
    source: SourceName
    passed: tuple[str, ...] = ()


def pick(
    known: KnownSpeeds,
    live: LiveRegression | None = None,
    order: Sequence[SourceName] = ORDER,
    *,
    role: Role | None = None,
) -> PickedModel | None:
    """Return the first available source; None where there is none.

    Args:
        role: the engines' role: a source without it is skipped; None takes any.
        live: the regression over observed passes; it counts once it can answer.
    Raises:
        ConfigError: a source exists and is not as it must be: a broken profile is never skipped silently.
    """
    passed: list[str] = []
    for name in order:
        if name == "live":
            if live is not None and live.prior is None and live.ready:
                return PickedModel(live, name, tuple(passed))
            passed.append("live: too few passes were seen")
            continue
        points = known.points(name)
        if points is None:
            passed.append(f"{name}: {known.why_not.get(name, 'there is none')}")
            continue
        table = BenchmarkTable.of_metrics(points, name)
        lacks_prefill = role in ("prefill", "aggregated") and not table.has_prefill
        if not lacks_prefill and (table.has_decode or role in (None, "prefill")):
            return PickedModel(table, name, tuple(passed))
        passed.append(f"{name}: it says nothing of {'prefill' if lacks_prefill else 'decode'}")
    return None


def profile_of(metrics: Mapping[str, Any], *, gpus: int, kv_tokens: int) -> Profile:
    """Return a worker's own measurement in the form of a profile, to be stored or interpolated.

    Args:
        gpus: of the engine; ``kv_tokens``: capacity of its cache.
    Raises:
        ConfigError: it has no room for KV.
    """
    if kv_tokens <= 0 or gpus <= 0:
        raise ConfigError(f"a profile needs gpus and kv_tokens above 0, not {gpus} and {kv_tokens}")
    table = BenchmarkTable.of_metrics(metrics)
    isl = np.asarray(sorted({float(point["tokens"]) for point in metrics.get("prefill", ())}))
    ttft = table.prefill(isl) if len(isl) else isl
    profile = Profile(
        prefill_isl=tuple(isl.tolist()),
        prefill_ttft=tuple(ttft.tolist()),
        prefill_per_gpu=tuple((isl / ttft / gpus).tolist()),
        kv_tokens=kv_tokens,
    )
    points = [(point["batch"], point["kv_tokens"]) for point in metrics.get("decode", ())]
    points = [(batch, kv) for batch, kv in points if batch > 0 and kv > 0]
    if not points:
        return profile
    # Profiles are swept context by context; a benchmark's batches have their own contexts, so values are interpolated.
    most = max(batch for batch, _ in points)
    lengths = [kv / batch for batch, kv in points]
    contexts = np.geomspace(min(lengths), max(lengths), PROFILE_CONTEXTS)
    rows = []
    for context in contexts.tolist():
        batch = np.unique(np.geomspace(1.0, max(1.0, min(most, kv_tokens / context)), PROFILE_BATCHES))
        seconds = table.decode(batch, batch * context)
        usage = np.minimum(1.0, batch * context / kv_tokens)
        rows.append(np.column_stack([usage, np.full(len(batch), context), seconds, batch / seconds / gpus]))
    usages, at, itl, per_gpu = (tuple(column.tolist()) for column in np.concatenate(rows).T)
    return msgspec.structs.replace(profile, usage=usages, context=at, itl=itl, decode_per_gpu=per_gpu)
