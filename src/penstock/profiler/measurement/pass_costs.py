"""Pass costs beside the GPU's work: the host's gaps and the collectives, from what engines say of their passes."""

import statistics
from collections.abc import Sequence

import numpy as np

from penstock.config.files.profile_manifest import HostCosts, ProfilePoint
from penstock.planner.performance.benchmark_table import nonnegative


def host_costs(points: Sequence[ProfilePoint]) -> HostCosts:
    """Return the constants; what no engine could be asked for is absent, never assumed."""
    asked = [point for point in points if point.inside is not None]
    return HostCosts(
        pass_gap=_by_size([point for point in asked if point.kind == "decode"]),
        request=_by_size([point for point in asked if point.kind == "prefill"]),
        collectives=collective_seconds(points),
    )


def collective_seconds(points: Sequence[ProfilePoint]) -> float | None:
    """Return what the exchanges of one decode pass cost, as the part that sizes above 1 have and size 1 has not.

    A pass of one sequence takes fixed + work / size + collectives where the size is above 1. That is three unknowns:
    None unless three sizes were measured, 1 among them. What grows with the size counts to the collectives.
    """
    mine = [point for point in points if point.kind == "decode" and point.seqs == 1]
    least = min((point.context for point in mine), default=0.0)
    passes = {p.tp: p.mean if p.inside is None else p.inside for p in mine if p.context <= 1.1 * least}
    if len(passes) < 3 or 1 not in passes:
        return None
    sizes = np.asarray(sorted(passes), dtype=np.float64)
    seconds = np.asarray([passes[int(size)] for size in sizes])
    _, _, several = nonnegative(np.column_stack([1.0 / sizes, sizes > 1.0]).astype(np.float64), seconds)
    return several


def _by_size(points: Sequence[ProfilePoint]) -> dict[int, float]:
    sizes = sorted({point.tp for point in points})
    gaps = {tp: [p.mean - p.inside for p in points if p.tp == tp and p.inside is not None] for tp in sizes}
    return {tp: max(0.0, statistics.median(each)) for tp, each in gaps.items()}
