"""How many workers are cheapest, at an uncertain rate? Misses have a price in GPU time, and so has every worker.

A table per role holds the share of requests that keep the service level, by workers and rate, as
`penstock.planner.serving` has it. For each candidate the expected misses over the quantiles of the rate are added up;
the one whose GPUs and misses together cost least is taken. That is a newsvendor's choice: the last GPU just pays for
the misses that it spares.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.kernel.values import Role
from penstock.planner.serving import Serving

Floats = npt.NDArray[np.float64]

ROWS: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of workers that a table is computed for; between them it is read off the line, above the last one counts."""
POINTS = 48
"""Rates per worker in a row."""
TOP = 1.3
"""Highest rate per worker of a row, in units of what one could do at most."""
SIDES: tuple[tuple[Role, ...], ...] = (("aggregated",), ("prefill", "decode"))
"""Roles that serve requests without the others."""
TURNS_MAX = 8
AMPLE, AMPLE_MORE = 3.0, 6
"""Workers above which nothing is tried: so many times what the highest rate fills, and so many more."""
JOINT_MAX = 64
"""Most workers of each role up to which pairs are tried one by one; above, one role after the other, in turns."""


class Table:
    """Share kept, by workers and rate, for one role.

    Args:
        servings: what is promised to each class of requests, with the class's weight in the whole; they all load the
            same workers.
    """

    def __init__(self, servings: Serving | Sequence[tuple[float, Serving]], role: Role) -> None:
        parts = [(1.0, servings)] if isinstance(servings, Serving) else list(servings)
        self.role = role
        self.least = max(1e-6, parts[0][1].least(role))
        """Seconds of a worker that a request takes at the least."""
        self._span()
        workers = np.repeat(np.asarray(ROWS, dtype=np.float64), POINTS)
        rates = np.maximum(np.tile(self._rates, len(ROWS)) * workers, 1e-9)
        total = sum(weight for weight, _ in parts) or 1.0
        both = sum(weight / total * serving.kept(role, rates, workers).both for weight, serving in parts)
        # More load never helps; where the closed forms say so by a hair, they err.
        self._both = np.minimum.accumulate(np.reshape(both, (len(ROWS), POINTS)), axis=1)

    def kept(self, workers: Floats, rate: Floats) -> Floats:
        """Return the share kept; ``workers`` and ``rate`` broadcast. No worker keeps nothing."""
        workers, rate = np.broadcast_arrays(np.asarray(workers, dtype=np.float64), np.asarray(rate, dtype=np.float64))
        some = np.maximum(workers, 1.0)
        place = np.clip(rate / some / self._top, 0.0, 1.0) * (POINTS - 1)
        low = np.minimum(place.astype(np.int64), POINTS - 2)
        share = place - low
        row = np.interp(np.minimum(some, ROWS[-1]), ROWS, np.arange(len(ROWS)))
        under = np.minimum(row.astype(np.int64), len(ROWS) - 2)
        part = row - under
        near = self._both[under, low] * (1.0 - share) + self._both[under, low + 1] * share
        far = self._both[under + 1, low] * (1.0 - share) + self._both[under + 1, low + 1] * share
        found = near * (1.0 - part) + far * part
        # Beyond the end of the row the queue grows without bound.
        found = np.where(rate / some > self._top, 0.0, found)
        return np.asarray(np.where(workers < 0.5, np.where(rate > 1e-9, 0.0, 1.0), found))

    def snapshot(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"role": self.role, "least": self.least, "both": self._both.tolist()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Table":
        """Return what `snapshot` wrote."""
        found = cls.__new__(cls)
        found.role, found.least = state["role"], state["least"]
        found._both = np.array(state["both"])
        found._span()
        return found

    def _span(self) -> None:
        self._top = TOP / self.least
        """The last rate per worker of a row."""
        self._rates = np.linspace(0.0, self._top, POINTS)

    @property
    def attainable(self) -> float:
        """The share kept at hardly any load: what no number of workers exceeds."""
        return float(self._both[-1, 0])

    def capacity(self, workers: float, share: float = 0.9) -> float:
        """Return the highest rate (requests/s) at which so many workers keep ``share`` of what is attainable."""
        if workers < 1:
            return 0.0
        rates = self._rates * workers
        kept = self.kept(np.full(POINTS, float(workers)), rates)
        good = np.flatnonzero(kept >= share * self.attainable)
        return float(rates[good[-1]]) if len(good) else 0.0


class Demand(NamedTuple):
    """A rate that is not known for sure: values (requests/s) and their weights, which sum to 1; shape (q,) each."""

    rates: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        return float(np.dot(self.rates, self.weights))

    @classmethod
    def of_quantiles(cls, ranks: Sequence[float], rates: Floats) -> "Demand":
        """Return the distribution that has these quantiles: each stands for its half of the gaps to its neighbours."""
        edges = np.concatenate(([0.0], (np.asarray(ranks)[1:] + np.asarray(ranks)[:-1]) / 2.0, [1.0]))
        return cls(np.asarray(rates, dtype=np.float64), np.diff(edges))


class Candidate(NamedTuple):
    """A fleet and what is expected of it. ``kept``: share of requests; ``cost``: GPUs, with the price of misses."""

    workers: Mapping[Role, int]
    gpus: int
    kept: float
    cost: float

    def told(self) -> dict[str, Any]:
        """Return it as plain data for the record."""
        return {
            "workers": dict(self.workers),
            "gpus": self.gpus,
            "kept": round(self.kept, 4),
            "cost": round(self.cost, 3),
        }


class Bounds(NamedTuple):
    """What a role may have: workers from ``least`` to ``most``, each of ``gpus`` GPUs."""

    least: int
    most: int
    gpus: int


class Sizing:
    """Choose a fleet for one model.

    Args:
        tables: by role; prefill and decode together, or aggregated, or both.
        price: GPU-seconds that a missed request costs.
    """

    def __init__(self, tables: Mapping[Role, Table], price: float) -> None:
        self.tables = dict(tables)
        self.price = price

    def snapshot(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"price": self.price, "tables": [table.snapshot() for table in self.tables.values()]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Sizing":
        """Return what `snapshot` wrote."""
        tables = [Table.restored(told) for told in state["tables"]]
        return cls({table.role: table for table in tables}, state["price"])

    def kept(self, workers: Mapping[Role, Floats | float], rate: Floats) -> Floats:
        """Return the share kept by a fleet; arrays broadcast.

        Where some workers do everything and others share the work, each side gets requests by what it can do.
        """
        counts = {role: np.asarray(workers.get(role, 0.0), dtype=np.float64) for role in self.tables}
        if "aggregated" not in counts:
            return self._split(counts, rate)
        if "prefill" not in counts:
            return self.tables["aggregated"].kept(counts["aggregated"], rate)
        whole = counts["aggregated"] / self.tables["aggregated"].least
        halves = np.minimum(
            counts["prefill"] / self.tables["prefill"].least, counts["decode"] / self.tables["decode"].least
        )
        share = whole / np.maximum(whole + halves, 1e-12)
        one = self.tables["aggregated"].kept(counts["aggregated"], rate * share)
        return np.asarray(share * one + (1.0 - share) * self._split(counts, rate * (1.0 - share)))

    def _split(self, counts: Mapping[Role, Floats], rate: Floats) -> Floats:
        prefill = self.tables["prefill"].kept(counts["prefill"], rate)
        return np.asarray(prefill * self.tables["decode"].kept(counts["decode"], rate))

    def expected(self, workers: Mapping[Role, int], demand: Demand) -> float:
        """Return the share of requests that a fleet is expected to keep."""
        kept = self.kept({role: float(n) for role, n in workers.items()}, demand.rates)
        total = demand.mean
        return float(np.dot(kept * demand.rates, demand.weights)) / total if total > 0.0 else 1.0

    def candidate(self, workers: Mapping[Role, int], demand: Demand, bounds: Mapping[Role, Bounds]) -> Candidate:
        """Return what a fleet costs."""
        gpus = sum(bounds[role].gpus * n for role, n in workers.items())
        kept = self.expected(workers, demand)
        return Candidate(dict(workers), gpus, kept, gpus + self.price * demand.mean * (1.0 - kept))

    def best(self, demand: Demand, bounds: Mapping[Role, Bounds], most_gpus: float = np.inf) -> Candidate:
        """Return the cheapest fleet within bounds and GPUs; of equals the smaller one.

        Cost: for a role of n workers O(n q), for a pair of roles O(n m q) up to `JOINT_MAX` workers each; above that,
        and for three roles, one role after the other, in turns.
        """
        bounds = {role: self._sensible(role, bound, demand) for role, bound in bounds.items()}
        roles = list(self.tables)
        if len(roles) == 1:
            return self._line(roles[0], {}, demand, bounds, most_gpus)
        if len(roles) == 2 and all(bounds[role].most <= JOINT_MAX for role in roles):
            return self._square(demand, bounds, most_gpus)
        least = {role: bound.least for role, bound in bounds.items()}
        # A role alone can't help where its partner is missing: so from every full side in turn.
        starts = [{**least, **{role: bounds[role].most for role in side}} for side in SIDES if set(side) <= set(roles)]
        found = [self._turns(start, demand, bounds, most_gpus) for start in starts]
        return min(found, key=lambda each: each.cost)

    def _sensible(self, role: Role, bound: Bounds, demand: Demand) -> Bounds:
        """Return bounds without the numbers that no rate of the demand needs: three times what its work fills."""
        enough = int(AMPLE * float(demand.rates.max()) * self.tables[role].least) + AMPLE_MORE
        return bound._replace(most=max(bound.least, min(bound.most, enough)))

    def _turns(
        self, start: Mapping[Role, int], demand: Demand, bounds: Mapping[Role, Bounds], most_gpus: float
    ) -> Candidate:
        """Return what comes of choosing one role's number after the other's, each exactly, until none changes."""
        best = self.candidate(start, demand, bounds)
        for _ in range(TURNS_MAX):
            before = best.workers
            for role in self.tables:
                others = {other: count for other, count in best.workers.items() if other != role}
                best = self._line(role, others, demand, bounds, np.inf)
            if best.workers == before:
                break
        return self._within(best, demand, bounds, most_gpus)

    def _line(
        self,
        role: Role,
        others: Mapping[Role, int],
        demand: Demand,
        bounds: Mapping[Role, Bounds],
        most_gpus: float,
    ) -> Candidate:
        """Return the best number of one role, the others' given."""
        own = bounds[role]
        most = own.most if not np.isfinite(most_gpus) else min(own.most, int(most_gpus // max(1, own.gpus)))
        counts = np.arange(own.least, max(own.least, most) + 1, dtype=np.float64)
        kept = self.kept({**dict(others), role: counts[:, None]}, demand.rates[None, :])
        misses = ((1.0 - kept) * demand.rates) @ demand.weights
        cost = counts * own.gpus + self.price * misses
        choice = int(counts[int(np.argmin(np.round(cost, 9)))])
        return self.candidate({**dict(others), role: choice}, demand, bounds)

    def _square(self, demand: Demand, bounds: Mapping[Role, Bounds], most_gpus: float) -> Candidate:
        """Return the best pair of prefill and decode, all pairs tried."""
        prefill, decode = bounds["prefill"], bounds["decode"]
        first = np.arange(prefill.least, prefill.most + 1, dtype=np.float64)
        second = np.arange(decode.least, decode.most + 1, dtype=np.float64)
        kept_first = self.tables["prefill"].kept(first[:, None], demand.rates[None, :])
        kept_second = self.tables["decode"].kept(second[:, None], demand.rates[None, :])
        # kept[p, d] = sum over the rates of weight x rate x kept_prefill x kept_decode: one product of matrices.
        weight = demand.rates * demand.weights
        good = (kept_first * weight) @ kept_second.T
        gpus = first[:, None] * prefill.gpus + second[None, :] * decode.gpus
        cost = gpus + self.price * (demand.mean - good)
        allowed = gpus <= most_gpus
        if not allowed.any():
            return self.candidate({"prefill": prefill.least, "decode": decode.least}, demand, bounds)
        cost = np.where(allowed, np.round(cost, 9), np.inf)
        place = int(np.argmin(cost + 1e-9 * gpus))
        p, d = divmod(place, len(second))
        return self.candidate({"prefill": int(first[p]), "decode": int(second[d])}, demand, bounds)

    def _within(self, found: Candidate, demand: Demand, bounds: Mapping[Role, Bounds], most_gpus: float) -> Candidate:
        """Take workers away, each time where that costs the fewest misses, until the GPUs suffice."""
        workers = dict(found.workers)
        while sum(bounds[role].gpus * n for role, n in workers.items()) > most_gpus:
            fewer = [{**workers, role: n - 1} for role, n in workers.items() if n > bounds[role].least]
            if not fewer:
                break
            workers = max(fewer, key=lambda one: self.expected(one, demand))
        return self.candidate(workers, demand, bounds)

    def neighbours(self, chosen: Candidate, demand: Demand, bounds: Mapping[Role, Bounds]) -> list[Candidate]:
        """Return the fleets around a choice, by cost: what was rejected, and at which price."""
        found = []
        for role, n in chosen.workers.items():
            for step in (-2, -1, 1, 2):
                if bounds[role].least <= n + step <= bounds[role].most:
                    found.append(self.candidate({**chosen.workers, role: n + step}, demand, bounds))
        return sorted(found, key=lambda one: one.cost)
