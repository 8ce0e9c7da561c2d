"""Should a worker do something else? A change of role takes seconds where a start takes minutes, and costs no GPU."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.kernel.values import Role
from penstock.planner.proposals import Because, Flip
from penstock.planner.sizing import Demand, Sizing

SOON = 15.0
"""Seconds that a change of role takes, about: its worker finishes what it has first."""
GAIN = 0.02
"""Share of requests that it must save, or it is not worth the disturbance."""
PAUSE = 60.0
"""Seconds between two changes: what the first one brought must be seen before the next."""
AT_ONCE = 2
"""Most workers that change at a time."""


class Change(NamedTuple):
    """A change of role: how many workers, and what it is expected to save."""

    flip: Flip
    because: Because


def change(
    model: str,
    ready: Mapping[Role, int],
    least: Mapping[Role, int],
    sizing: Sizing,
    soon: Demand,
    later: Demand,
) -> Change | None:
    """Return the change between prefill and decode that saves most now and hurts nobody later; None where none does.

    Args:
        ready: workers that serve, by the role that they do; ``least``: fewest of each.
        soon: the rate within `SOON`; ``later``: when what is ordered now serves.
    """
    if not {"prefill", "decode"} <= set(ready):
        return None
    now, then = sizing.expected(ready, soon), sizing.expected(ready, later)
    best: tuple[float, Flip] | None = None
    sides: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for frm, to in sides:
        for count in range(1, min(AT_ONCE, ready[frm] - max(1, least[frm])) + 1):
            after = {**ready, frm: ready[frm] - count, to: ready[to] + count}
            gain = sizing.expected(after, soon) - now
            if gain >= GAIN and sizing.expected(after, later) >= then and (best is None or gain > best[0] + 1e-9):
                best = (gain, Flip(model=model, frm=frm, to=to, count=count))
    if best is None:
        return None
    gain, flip = best
    text = (
        f"{flip.count} of {model}'s {flip.frm} workers should {flip.to}: within seconds, and at no cost, {now:.1%} in "
        f"SLO become {now + gain:.1%}"
    )
    facts = {"frm": flip.frm, "to": flip.to, "count": flip.count, "kept": now, "gain": gain}
    return Change(flip, Because(code="flip", text=text, facts=facts))
