"""Role flips of policy slo: a change of role takes seconds where a start takes minutes, and costs no GPU."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.kernel.values import Role
from penstock.planner.plugins.proposals import Flip, Reason
from penstock.planner.sizing.fleet_sizing import Sizing, UncertainDemand

SOON = 15.0
"""Seconds that a change of role takes, about: its worker finishes its requests first."""
GAIN = 0.02
"""Least harm to spare, as a share of the cost of missing all requests; less is not worth the disturbance."""
PAUSE = 60.0
"""Seconds between two changes: the effect of the first must be observed before the next."""
AT_ONCE = 2
"""Most workers that change at a time."""


class RoleChange(NamedTuple):
    """A change of role with its reason: how many workers, and the expected saving."""

    flip: Flip
    reason: Reason


def change(
    model: str,
    ready: Mapping[Role, int],
    least: Mapping[Role, int],
    sizing: Sizing,
    soon: UncertainDemand,
    later: UncertainDemand,
) -> RoleChange | None:
    """Return the change between prefill and decode that saves most now and harms no role later; None where none does.

    Args:
        ready: workers that serve, by their present role; ``least``: fewest of each.
        soon: the rate within `SOON`; ``later``: when an order of now serves.
    """
    if not {"prefill", "decode"} <= set(ready):
        return None
    now, then = sizing.expected_harm(ready, soon), sizing.expected_harm(ready, later)
    worth = GAIN * sizing.price * soon.mean
    best: tuple[float, Flip] | None = None
    sides: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for frm, to in sides:
        for count in range(1, min(AT_ONCE, ready[frm] - max(1, least[frm])) + 1):
            after = {**ready, frm: ready[frm] - count, to: ready[to] + count}
            gain = now - sizing.expected_harm(after, soon)
            if gain < worth or sizing.expected_harm(after, later) > then + 1e-9:
                continue
            if best is None or gain > best[0] + 1e-9:
                best = (gain, Flip(model=model, frm=frm, to=to, count=count))
    if best is None:
        return None
    gain, flip = best
    changed = {**ready, flip.frm: ready[flip.frm] - flip.count, flip.to: ready[flip.to] + flip.count}
    in_slo = [sizing.expected(workers, soon) for workers in (ready, changed)]
    answered = [sizing.expected_answered(workers, soon) for workers in (ready, changed)]
    text = (
        f"{flip.count} of {model}'s {flip.frm} workers should {flip.to}: within seconds, and at no cost, "
        f"{in_slo[0]:.1%} in SLO become {in_slo[1]:.1%}, and {answered[0]:.1%} that can be answered at all "
        f"{answered[1]:.1%}"
    )
    facts = {
        "frm": flip.frm,
        "to": flip.to,
        "count": flip.count,
        "attainment": in_slo[0],
        "gain": gain,
        "answered": answered[1],
    }
    return RoleChange(flip, Reason(code="flip", text=text, facts=facts))
