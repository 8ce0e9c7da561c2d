"""Fleet sizing: the cheapest fleet for an uncertain rate. Misses have a price in GPU time, and so has every worker.

A table per role holds the share of requests that keep the service level, by workers and rate, computed by
`penstock.planner.sizing.attainment`. For each candidate the expected harm over the quantiles of the rate is summed; the
fleet whose GPUs and harm together cost least is chosen. That is a newsvendor's choice: the last GPU just pays for the
harm that it avoids.

Harm is the cost of misses, and a little more for those that come very late or are not answered at all. Without that
little, all fleets would look alike under an overload that none of them keeps, and the smallest would be the cheapest:
work that is not done now is not saved, it only waits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.kernel.machine import Snapshot
from penstock.kernel.values import Role
from penstock.planner.sizing.attainment import AttainmentModel

Floats = npt.NDArray[np.float64]

ROWS: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Worker counts that a table is computed for; between them it is interpolated, above the last one that one counts."""
POINTS = 48
"""Rates per worker in a row."""
TOP = 1.3
"""Highest rate per worker of a row, in units of one worker's maximum."""
SIDES: tuple[tuple[Role, ...], ...] = (("aggregated",), ("prefill", "decode"))
"""Roles that serve requests without the others."""
TURNS_MAX = 8
AMPLE, AMPLE_MORE = 3.0, 6
"""Workers above which nothing is tried: so many times the number that the highest rate fills, and so many more."""
LATER = 8.0
"""A request that misses its TTFT by this factor is very late."""
LATE, UNDONE = 0.25, 0.25
"""Cost of a very late answer beside the miss, and of a request that is never started, as shares of the
price of a miss. A guess: large enough that a GPU which does work pays for itself at any `planner.slo.miss_cost` of 4 or
more, small enough to leave fleets that keep the service level as they are."""
UNDONE_LEAST = 2.0
"""Lower bound of that cost, in units of the GPU time that the request takes: so that a GPU pays at any miss_cost."""
JOINT_MAX = 64
"""Most workers of each role up to which pairs are tried one by one; above, one role after the other, in turns."""


class ShareTable:
    """Attainment by workers and rate, for one role.

    Args:
        servings: attainment models of each class of requests, with the class's weight in the whole; they all load the
            same workers.
    """

    def __init__(self, servings: AttainmentModel | Sequence[tuple[float, AttainmentModel]], role: Role) -> None:
        parts = [(1.0, servings)] if isinstance(servings, AttainmentModel) else list(servings)
        self.role = role
        self.least = max(1e-6, parts[0][1].least(role))
        """Least seconds of a worker that a request takes."""
        self._span()
        workers = np.repeat(np.asarray(ROWS, dtype=np.float64), POINTS)
        rates = np.maximum(np.tile(self._rates, len(ROWS)) * workers, 1e-9)
        total = sum(weight for weight, _ in parts) or 1.0

        def grid(servings: Sequence[tuple[float, AttainmentModel]]) -> Floats:
            both = sum(weight / total * serving.attainment(role, rates, workers).both for weight, serving in servings)
            # More load never helps; where the closed forms give that by a hair, they err.
            return np.asarray(np.minimum.accumulate(np.reshape(both, (len(ROWS), POINTS)), axis=1))

        self._both = grid(parts)
        self._soon = grid([(weight, serving.relaxed(LATER)) for weight, serving in parts])

    def attainment(self, workers: Floats, rate: Floats) -> Floats:
        """Return the attainment; ``workers`` and ``rate`` broadcast. Without workers it is 0."""
        return self._read(self._both, workers, rate)

    def soon(self, workers: Floats, rate: Floats) -> Floats:
        """Return the share whose TTFT is at most `LATER` times the target, whatever its ITL."""
        return self._read(self._soon, workers, rate)

    def _read(self, grid: Floats, workers: Floats, rate: Floats) -> Floats:
        workers, rate = np.broadcast_arrays(np.asarray(workers, dtype=np.float64), np.asarray(rate, dtype=np.float64))
        some = np.maximum(workers, 1.0)
        place = np.clip(rate / some / self._top, 0.0, 1.0) * (POINTS - 1)
        low = np.minimum(place.astype(np.int64), POINTS - 2)
        share = place - low
        row = np.interp(np.minimum(some, ROWS[-1]), ROWS, np.arange(len(ROWS)))
        under = np.minimum(row.astype(np.int64), len(ROWS) - 2)
        part = row - under
        near = grid[under, low] * (1.0 - share) + grid[under, low + 1] * share
        far = grid[under + 1, low] * (1.0 - share) + grid[under + 1, low + 1] * share
        attained = near * (1.0 - part) + far * part
        # Beyond the end of the row the queue grows without bound.
        attained = np.where(rate / some > self._top, 0.0, attained)
        return np.asarray(np.where(workers < 0.5, np.where(rate > 1e-9, 0.0, 1.0), attained))

    def snapshot(self) -> Snapshot:
        """Return the table as plain data."""
        return {"role": self.role, "least": self.least, "both": self._both.tolist(), "soon": self._soon.tolist()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "ShareTable":
        """Return the table that `snapshot` wrote."""
        table = cls.__new__(cls)
        table.role, table.least = state["role"], state["least"]
        table._both, table._soon = np.array(state["both"]), np.array(state["soon"])
        table._span()
        return table

    def _span(self) -> None:
        self._top = TOP / self.least
        """Set the last rate per worker of a row."""
        self._rates = np.linspace(0.0, self._top, POINTS)

    @property
    def attainable(self) -> float:
        """Attainment at hardly any load: no number of workers exceeds it."""
        return float(self._both[-1, 0])

    def capacity(self, workers: float, share: float = 0.9) -> float:
        """Return the highest rate (requests/s) at which so many workers keep ``share`` of what is attainable."""
        if workers < 1:
            return 0.0
        rates = self._rates * workers
        attained = self.attainment(np.full(POINTS, float(workers)), rates)
        good = np.flatnonzero(attained >= share * self.attainable)
        return float(rates[good[-1]]) if len(good) else 0.0


Read = Callable[[ShareTable, Floats, Floats], Floats]
"""Reads a share from a table: (table, workers, rate)."""


class UncertainDemand(NamedTuple):
    """An uncertain rate: values (requests/s) and their weights, which sum to 1; shape (q,) each."""

    rates: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        return float(np.dot(self.rates, self.weights))

    @classmethod
    def of_quantiles(cls, ranks: Sequence[float], rates: Floats) -> "UncertainDemand":
        """Return the distribution that has these quantiles: each stands for its half of the gaps to its neighbours."""
        edges = np.concatenate(([0.0], (np.asarray(ranks)[1:] + np.asarray(ranks)[:-1]) / 2.0, [1.0]))
        return cls(np.asarray(rates, dtype=np.float64), np.diff(edges))


class FleetCandidate(NamedTuple):
    """A fleet with its expected attainment and cost.

    Args:
        attainment: share of requests that keep the service level; ``answered``: share that is started at all, since no
            queue grows without end.
        cost: GPUs, with the price of the harm done.
    """

    workers: Mapping[Role, int]
    gpus: int
    attainment: float
    answered: float
    cost: float

    def as_data(self) -> dict[str, Any]:
        """Return the candidate as plain data for the record."""
        return {
            "workers": dict(self.workers),
            "gpus": self.gpus,
            "attainment": round(self.attainment, 4),
            "answered": round(self.answered, 4),
            "cost": round(self.cost, 3),
        }


class Bounds(NamedTuple):
    """Bounds of a role: workers from ``least`` to ``most``, each of ``gpus`` GPUs."""

    least: int
    most: int
    gpus: int


class Sizing:
    """Chooses a fleet for one model.

    Args:
        tables: by role; prefill and decode together, or aggregated, or both.
        price: GPU-seconds that a missed request costs.
        work: least GPU-seconds that serving a request takes.
    """

    def __init__(self, tables: Mapping[Role, ShareTable], price: float, work: float) -> None:
        self.tables = dict(tables)
        self.price = price
        self.work = work
        self.undone = max(UNDONE * price, UNDONE_LEAST * work)
        """GPU-seconds that a request costs which is never started, beside the miss."""

    def snapshot(self) -> Snapshot:
        """Return the sizing as plain data."""
        tables = [table.snapshot() for table in self.tables.values()]
        return {"price": self.price, "work": self.work, "tables": tables}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Sizing":
        """Return the sizing that `snapshot` wrote."""
        tables = [ShareTable.restored(saved) for saved in state["tables"]]
        return cls({table.role: table for table in tables}, state["price"], state["work"])

    def attainment(self, workers: Mapping[Role, Floats | float], rate: Floats) -> Floats:
        """Return a fleet's attainment; arrays broadcast.

        Where some workers are aggregated and others split the work, each side gets requests by its capacity.
        """
        return self._shared(workers, rate, ShareTable.attainment)

    def harm(self, workers: Mapping[Role, Floats | float], rate: Floats) -> Floats:
        """Return the cost, in GPUs, of a second's requests that miss the service level; arrays broadcast."""
        missed = 1.0 - self._shared(workers, rate, ShareTable.attainment)
        late = 1.0 - self._shared(workers, rate, ShareTable.soon)
        undone = 1.0 - self.answered(workers, rate)
        return np.asarray(rate * (self.price * (missed + LATE * late) + self.undone * undone))

    def answered(self, workers: Mapping[Role, Floats | float], rate: Floats) -> Floats:
        """Return the share that a fleet has the time to start at all; arrays broadcast."""
        can: Floats = np.zeros(1)
        for side in SIDES:
            if set(side) <= set(self.tables):
                each = [np.asarray(workers.get(role, 0.0)) / self.tables[role].least for role in side]
                can = can + (np.minimum(*each) if len(each) > 1 else each[0])
        return np.asarray(np.minimum(1.0, can / np.maximum(rate, 1e-9)))

    def _shared(self, workers: Mapping[Role, Floats | float], rate: Floats, read: Read) -> Floats:
        counts = {role: np.asarray(workers.get(role, 0.0), dtype=np.float64) for role in self.tables}

        def split(rate: Floats) -> Floats:
            prefill = read(self.tables["prefill"], counts["prefill"], rate)
            return np.asarray(prefill * read(self.tables["decode"], counts["decode"], rate))

        if "aggregated" not in counts:
            return split(rate)
        if "prefill" not in counts:
            return read(self.tables["aggregated"], counts["aggregated"], rate)
        whole = counts["aggregated"] / self.tables["aggregated"].least
        halves = np.minimum(
            counts["prefill"] / self.tables["prefill"].least, counts["decode"] / self.tables["decode"].least
        )
        share = whole / np.maximum(whole + halves, 1e-12)
        one = read(self.tables["aggregated"], counts["aggregated"], rate * share)
        return np.asarray(share * one + (1.0 - share) * split(rate * (1.0 - share)))

    def expected(self, workers: Mapping[Role, int], demand: UncertainDemand) -> float:
        """Return a fleet's expected attainment."""
        return self._mean(self.attainment(_floats(workers), demand.rates), demand)

    def expected_answered(self, workers: Mapping[Role, int], demand: UncertainDemand) -> float:
        """Return the share of requests that a fleet is expected to start at all."""
        return self._mean(self.answered(_floats(workers), demand.rates), demand)

    def expected_harm(self, workers: Mapping[Role, int], demand: UncertainDemand) -> float:
        """Return the expected cost of requests that miss the service level, in GPUs."""
        return float(np.dot(self.harm(_floats(workers), demand.rates), demand.weights))

    def candidate(
        self, workers: Mapping[Role, int], demand: UncertainDemand, bounds: Mapping[Role, Bounds]
    ) -> FleetCandidate:
        """Return a fleet with its cost."""
        gpus = sum(bounds[role].gpus * n for role, n in workers.items())
        answered = self.expected_answered(workers, demand)
        cost = gpus + self.expected_harm(workers, demand)
        return FleetCandidate(dict(workers), gpus, self.expected(workers, demand), answered, cost)

    @staticmethod
    def _mean(share: Floats, demand: UncertainDemand) -> float:
        """Return the mean of a share over the requests of a demand; without requests it is 1."""
        total = demand.mean
        return float(np.dot(share * demand.rates, demand.weights)) / total if total > 0.0 else 1.0

    def best(self, demand: UncertainDemand, bounds: Mapping[Role, Bounds], most_gpus: float = np.inf) -> FleetCandidate:
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
        candidates = [self._turns(start, demand, bounds, most_gpus) for start in starts]
        return min(candidates, key=lambda each: each.cost)

    def _sensible(self, role: Role, bound: Bounds, demand: UncertainDemand) -> Bounds:
        """Return bounds without the numbers that no rate of the demand needs: three times what its work fills."""
        enough = int(AMPLE * float(demand.rates.max()) * self.tables[role].least) + AMPLE_MORE
        return bound._replace(most=max(bound.least, min(bound.most, enough)))

    def _turns(
        self, start: Mapping[Role, int], demand: UncertainDemand, bounds: Mapping[Role, Bounds], most_gpus: float
    ) -> FleetCandidate:
        """Return the fleet from choosing one role's number after the other's, each exactly, until none changes."""
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
        demand: UncertainDemand,
        bounds: Mapping[Role, Bounds],
        most_gpus: float,
    ) -> FleetCandidate:
        """Return the best number of one role, the others' given."""
        own = bounds[role]
        most = own.most if not np.isfinite(most_gpus) else min(own.most, int(most_gpus // max(1, own.gpus)))
        counts = np.arange(own.least, max(own.least, most) + 1, dtype=np.float64)
        harm = self.harm({**dict(others), role: counts[:, None]}, demand.rates[None, :])
        cost = counts * own.gpus + harm @ demand.weights
        choice = int(counts[int(np.argmin(np.round(cost, 9)))])
        return self.candidate({**dict(others), role: choice}, demand, bounds)

    def _square(self, demand: UncertainDemand, bounds: Mapping[Role, Bounds], most_gpus: float) -> FleetCandidate:
        """Return the best pair of prefill and decode; all pairs are tried."""
        prefill, decode = bounds["prefill"], bounds["decode"]
        first = np.arange(prefill.least, prefill.most + 1, dtype=np.float64)
        second = np.arange(decode.least, decode.most + 1, dtype=np.float64)
        gpus = first[:, None] * prefill.gpus + second[None, :] * decode.gpus
        pairs: dict[Role, Floats | float] = {"prefill": first[:, None, None], "decode": second[None, :, None]}
        cost = gpus + self.harm(pairs, demand.rates[None, None, :]) @ demand.weights
        allowed = gpus <= most_gpus
        if not allowed.any():
            return self.candidate({"prefill": prefill.least, "decode": decode.least}, demand, bounds)
        cost = np.where(allowed, np.round(cost, 9), np.inf)
        place = int(np.argmin(cost + 1e-9 * gpus))
        p, d = divmod(place, len(second))
        return self.candidate({"prefill": int(first[p]), "decode": int(second[d])}, demand, bounds)

    def _within(
        self, fleet: FleetCandidate, demand: UncertainDemand, bounds: Mapping[Role, Bounds], most_gpus: float
    ) -> FleetCandidate:
        """Remove workers, each time where that does the least harm, until the GPUs suffice."""
        workers = dict(fleet.workers)
        while sum(bounds[role].gpus * n for role, n in workers.items()) > most_gpus:
            fewer = [{**workers, role: n - 1} for role, n in workers.items() if n > bounds[role].least]
            if not fewer:
                break
            workers = min(fewer, key=lambda one: self.expected_harm(one, demand))
        return self.candidate(workers, demand, bounds)

    def neighbours(
        self, chosen: FleetCandidate, demand: UncertainDemand, bounds: Mapping[Role, Bounds]
    ) -> list[FleetCandidate]:
        """Return the fleets around a choice, by cost: the rejected candidates with their price."""
        candidates = []
        for role, n in chosen.workers.items():
            for step in (-2, -1, 1, 2):
                if bounds[role].least <= n + step <= bounds[role].most:
                    candidates.append(self.candidate({**chosen.workers, role: n + step}, demand, bounds))
        return sorted(candidates, key=lambda one: one.cost)


def _floats(workers: Mapping[Role, int]) -> dict[Role, Floats | float]:
    return {role: float(n) for role, n in workers.items()}
