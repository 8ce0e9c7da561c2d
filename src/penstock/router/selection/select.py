"""Selection modes: each chooses one of the candidates, by a pure function over their costs.

`select` works without any runtime: give it costs, a mode and a generator, and it returns the choice with its reason.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.values import Target
from penstock.router.events import Cost
from penstock.router.selection.cost_table import CostTable, active_requests_of, cheapest_of, second_of, totals_of
from penstock.router.settings import Mode

SESSION_DISCOUNT = 0.3
"""Share of its cost that a soft session saves on its worker."""


class Selection(NamedTuple):
    """The chosen candidate and one sentence that says why."""

    cost: Cost
    reason: str


def select(
    mode: Mode,
    costs: Sequence[Cost],
    rng: random.Random,
    *,
    temperature: float = 0.0,
    turn: int = 0,
) -> Selection:
    """Choose one of the candidates.

    Args:
        costs: one per candidate, in a stable order, at least one.
        temperature: of the softmax in mode ``kv``; 0 takes the cheapest.
        turn: how many requests ``round_robin`` has placed before.
    Raises:
        ValueError: no candidates, or mode ``direct`` (a pinned request has one candidate and never comes here).
    Cost: O(candidates).
    """
    if not costs:
        raise ValueError("no candidates to choose from")
    if mode == "kv":
        return _cheapest(costs, rng) if temperature <= 0 else _sampled(costs, rng, temperature)
    if mode == "round_robin" or mode == "random":
        place, because = blind(mode, len(costs), rng, turn)
        return Selection(costs[place], because)
    places: Sequence[int] = range(len(costs))
    if mode == "least_loaded":
        return _least_loaded(costs, places, rng, f"of {_workers(costs)}")
    if mode == "power_of_two":
        pair = places if len(costs) <= 2 else rng.sample(places, 2)
        drawn = " and ".join(str(costs[place].target) for place in pair)
        return _least_loaded(costs, pair, rng, f"of two drawn at random: {drawn}")
    raise ValueError(f"mode {mode!r} needs a pinned worker: send x-penstock-worker or nvext.backend_instance_id")


def blind(mode: Mode, count: int, rng: random.Random, turn: int) -> tuple[int, str]:
    """Choose one of ``count`` candidates in a mode that needs no cost; return its place and the reason."""
    workers = f"{count} worker{'s' if count > 1 else ''}"
    if mode == "round_robin":
        return turn % count, f"turn {turn} of round robin over {workers}"
    return int(rng.random() * count), f"drawn at random of {workers}"


def probabilities(totals: Sequence[float], temperature: float) -> list[float]:
    """Softmax over costs normalised to their range: p_i ~ exp(-(c_i - min) / ((max - min) * temperature))."""
    low, high = min(totals), max(totals)
    if high - low <= 0:
        return [1.0 / len(totals)] * len(totals)
    weights = [math.exp(-(total - low) / ((high - low) * temperature)) for total in totals]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def _cheapest(costs: Sequence[Cost], rng: random.Random) -> Selection:
    ties = cheapest_of(costs)
    equal = len(ties)
    chosen = costs[int(ties[int(rng.random() * equal) if equal > 1 else 0])]
    if equal > 1:
        return Selection(chosen, f"{_price(chosen)}, drawn among {equal} equal ones")
    if len(costs) == 1:
        return Selection(chosen, f"{_price(chosen)}, the only candidate")
    second, total = second_of(costs, int(ties[0]))
    return Selection(chosen, f"{_price(chosen)}, the least of {len(costs)}; next {second} at {total:.1f}")


def _sampled(costs: Sequence[Cost], rng: random.Random, temperature: float) -> Selection:
    shares = probabilities(totals_of(costs), temperature)
    place = rng.choices(range(len(costs)), weights=shares)[0]
    cost = costs[place]
    return Selection(cost, f"{_price(cost)}, drawn with probability {shares[place]:.2f} at temperature {temperature:g}")


def _least_loaded(costs: Sequence[Cost], places: Sequence[int], rng: random.Random, among: str) -> Selection:
    running = active_requests_of(costs)
    least = min(running[place] for place in places)
    ties = [place for place in places if running[place] == least]
    chosen = ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]
    return Selection(costs[chosen], f"fewest running requests ({least}), {among}")


def _price(cost: Cost) -> str:
    blocks = cost.overlap_blocks  # worded here: this is on the way of every request
    text = f"cost {cost.total:.1f} {cost.unit} with {blocks} block{'' if blocks == 1 else 's'} cached"
    if cost.plugins:
        text += " (" + ", ".join(f"{name} added {added:.3g}" for name, added in cost.plugins.items()) + ")"
    return text


def _workers(costs: Sequence[Cost]) -> str:
    return f"{len(costs)} worker{'s' if len(costs) > 1 else ''}"


def pinned(cost: Cost, by: str) -> Selection:
    """The choice that was made beforehand: by the caller's pin or by a session's home."""
    return Selection(cost, f"{by}; {_price(cost)}")


def discounted(costs: Sequence[Cost], home: Target | None) -> Sequence[Cost]:
    """Take the soft session discount off the home target's cost."""
    left = 1.0 - SESSION_DISCOUNT
    if home is None:
        return costs
    if isinstance(costs, CostTable):
        return costs.discounted(home, left)
    replace = msgspec.structs.replace
    return [replace(cost, total=cost.total * left, discount=left) if cost.target == home else cost for cost in costs]
