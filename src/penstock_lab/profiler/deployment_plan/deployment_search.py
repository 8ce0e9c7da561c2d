"""Deployment search: the cheapest replicas of every engine, and of every pair of prefill and decode engines.

Replicas come from the closed forms of `penstock.planner.sizing.attainment`, in whole numbers. For a pair the prefill
and the decode side are matched: the fewest of each whose shares together reach the target, then the cheaper mixes of
one more here for one fewer there. A prefill's TTFT has the transfer of its KV and the first decode step in it.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from penstock.kernel.values import LatencyTargets, Role
from penstock.planner.sizing.attainment import TAIL, AttainmentModel
from penstock_lab.engine.settings import SimSettings
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCandidate, EngineCatalog, layout_label
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.profiler.deployment_plan.planned_traffic import PlannedTraffic

REPLICAS_MOST = 512
"""Replicas of a pool above which nothing is tried."""
MORE = 3
"""Replicas above the fewest of one side of a pair that are tried, to save some of the other."""
FULL = 0.97
"""Share of an engine's capacity from which it counts as full, as in the closed forms."""
LINK_FULL = 0.8
"""Share of a decode pool's links above which hand-offs would queue for them."""

Binding = Literal["one replica", "prefill compute", "KV memory", "batch limit", "TTFT", "ITL", "link"]
"""What keeps a pool from having one replica fewer."""


class EnginePool(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one engine in a deployment. ``price``: dollars per hour of all of them."""

    role: Role
    gpu: str
    replicas: int
    gpus: int
    """Of one replica."""
    sim: SimSettings
    price_each: float
    binds: Binding
    extrapolated: float | None = None
    """Share of the closed form's look-ups beyond what was measured; None where nothing is looked up."""

    @property
    def layout(self) -> str:
        """GPU and parallelism in words."""
        return layout_label(self.gpus, self.gpu, self.sim.timing)


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Pools that serve a model together. ``expected``: share of requests in SLO by the closed forms."""

    pools: tuple[EnginePool, ...]
    expected: float

    @property
    def gpus(self) -> int:
        return sum(pool.replicas * pool.gpus for pool in self.pools)

    @property
    def price(self) -> float:
        """Dollars per hour."""
        return sum(pool.replicas * pool.price_each for pool in self.pools)

    @property
    def mode(self) -> str:
        return "aggregated" if len(self.pools) == 1 else "disaggregated"

    @property
    def label(self) -> str:
        """The deployment in words: ``3 x h200 TP2, chunk 8,192``, or ``2P x h200 + 3D x h100``."""
        if len(self.pools) == 1:
            (pool,) = self.pools
            return f"{pool.replicas} x {pool.layout}, chunk {pool.sim.max_num_batched_tokens:,}"
        return " + ".join(f"{pool.replicas}{pool.role[0].upper()} x {pool.layout}" for pool in self.pools)

    @property
    def binds(self) -> str:
        if len(self.pools) == 1:
            return self.pools[0].binds
        return ", ".join(f"{pool.role}: {pool.binds}" for pool in self.pools)

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What makes it a different choice for a reader: roles and layouts, without replicas and chunk."""
        return tuple((pool.role, pool.layout) for pool in self.pools)

    def with_replicas(self, replicas: Sequence[int]) -> "Deployment":
        """Return the deployment with so many replicas of each pool."""
        pools = [msgspec.structs.replace(pool, replicas=n) for pool, n in zip(self.pools, replicas, strict=True)]
        return msgspec.structs.replace(self, pools=tuple(pools))


class Sized(NamedTuple):
    """Replicas of an engine, and the share of requests that they keep in SLO."""

    replicas: int
    share: float


class DeploymentSearch:
    """One request's deployments, cheapest first."""

    def __init__(self, request: PlanRequest, traffic: PlannedTraffic, catalog: EngineCatalog) -> None:
        self._request, self._traffic, self._catalog = request, traffic, catalog
        self._service: LatencyTargets = request.slo.of(None)
        mix = traffic.mix
        self._prompt_long = mix.quantile(mix.isl, 0.9)

    def deployments(self, most: float | None = None) -> list[Deployment]:
        """Return the cheapest deployment of every layout and pair of layouts, cheapest first.

        Args:
            most: GPUs; None is the request's limit.
        """
        limit = most if most is not None else (self._request.max_gpus or np.inf)
        best: dict[tuple[tuple[str, str], ...], Deployment] = {}
        for one in [*self._aggregated(limit), *self._pairs(limit)]:
            before = best.get(one.key)
            if before is None or _search_rank(one) < _search_rank(before):
                best[one.key] = one
        return sorted(best.values(), key=_search_rank)

    def _part(self, role: Role) -> Role:
        """Return the role whose work an engine does: one that makes no tokens only prefills."""
        return role if self._request.answers else "prefill"

    def _aggregated(self, limit: float) -> Iterable[Deployment]:
        for engine in self._catalog.candidates["aggregated"]:
            serving = self._model(engine)
            sized = self._least(serving, engine, self._request.attainment, limit)
            if sized is not None:
                pool = self._pool(engine, serving, sized.replicas)
                yield Deployment(pools=(pool,), expected=sized.share)

    def _pairs(self, limit: float) -> Iterable[Deployment]:
        target = self._request.attainment
        decodes = [(engine, self._model(engine)) for engine in self._catalog.candidates["decode"]]
        fewest = [(engine, model, self._least(model, engine, target, limit)) for engine, model in decodes]
        for prefill, (decode, after, least) in product(self._catalog.candidates["prefill"], fewest):
            if least is None:
                continue
            least = Sized(max(least.replicas, self._links(decode)), least.share)
            before = self._model(prefill, extra=self._handoff(prefill, decode))
            first = self._least(before, prefill, target, limit - least.replicas * decode.gpus)
            if first is None:
                continue
            choices = []
            for p, d in product(range(MORE + 1), range(MORE + 1)):
                counts = first.replicas + p, least.replicas + d
                # Each side's share has the misses that no load explains in it, which happen once.
                share = self._share(before, "prefill", counts[0]) * self._share(after, "decode", counts[1]) / (1 - TAIL)
                price = counts[0] * prefill.price + counts[1] * decode.price
                if share >= target and counts[0] * prefill.gpus + counts[1] * decode.gpus <= limit:
                    choices.append((price, -share, counts))
            if choices:
                _, share, counts = min(choices)
                pools = (self._pool(prefill, before, counts[0]), self._pool(decode, after, counts[1]))
                yield Deployment(pools=pools, expected=-share)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _model(self, engine: EngineCandidate, extra: float = 0.0) -> AttainmentModel:
        extra += engine.sim.request_overhead if engine.role != "decode" else 0.0
        return AttainmentModel(engine.times, engine.limits, self._traffic.mix, self._service, extra=extra)

    def _share(self, serving: AttainmentModel, role: Role, replicas: int) -> float:
        workers = np.full(len(self._traffic.rates), float(replicas))
        shares = serving.attainment(self._part(role), self._traffic.rates, workers)
        return float(np.dot(self._traffic.weights, shares.both))

    def _least(self, serving: AttainmentModel, engine: EngineCandidate, target: float, limit: float) -> Sized | None:
        """Return the fewest replicas that reach the target; None where no number within the limit does."""
        most = int(min(REPLICAS_MOST, limit // engine.gpus))
        low = high = max(1, int(self._traffic.rate * serving.least(self._part(engine.role))))
        if high > most:
            return None
        while (share := self._share(serving, engine.role, high)) < target:
            if high >= most:
                return None
            low, high = high + 1, min(2 * high, most)
        while low < high:
            middle = (low + high) // 2
            part = self._share(serving, engine.role, middle)
            if part >= target:
                high, share = middle, part
            else:
                low = middle + 1
        return Sized(high, share)

    def _handoff(self, prefill: EngineCandidate, decode: EngineCandidate) -> float:
        """Return the seconds that a hand-off adds to the TTFT of a long prompt: its transfer and the first step."""
        rate = min(prefill.sim.transfer.bandwidth, decode.sim.transfer.bandwidth)
        size = self._prompt_long * prefill.sim.transfer.kv_bytes_per_token
        return prefill.sim.transfer.latency + size / rate + float(decode.times.decode(1.0, 1.0))

    def _links(self, decode: EngineCandidate) -> int:
        """Return the decode replicas whose links carry the KV of all prompts."""
        transfer = decode.sim.transfer
        carried = float(self._traffic.rates.max()) * self._traffic.prompt * transfer.kv_bytes_per_token
        return max(1, ceil(carried / transfer.bandwidth / LINK_FULL))

    def _pool(self, engine: EngineCandidate, serving: AttainmentModel, replicas: int) -> EnginePool:
        return EnginePool(
            role=engine.role,
            gpu=engine.gpu,
            replicas=replicas,
            gpus=engine.gpus,
            sim=engine.sim,
            price_each=engine.price,
            binds=self._binds(engine, serving, replicas),
            extrapolated=engine.times.extrapolated,
        )

    def _binds(self, engine: EngineCandidate, serving: AttainmentModel, replicas: int) -> Binding:
        """Return what one replica fewer would break first."""
        if replicas == 1:
            return "one replica"
        if engine.role == "decode" and replicas == self._links(engine):
            return "link"
        rates, workers = self._traffic.rates, np.full(len(self._traffic.rates), replicas - 1.0)
        each = float(rates.max()) / (replicas - 1)
        role = self._part(engine.role)
        prefill = each * serving.least("prefill") if role != "decode" else 0.0
        decode = each * serving.least("decode") if role != "prefill" else 0.0
        if prefill + decode >= FULL:
            if prefill >= decode:
                return "prefill compute"
            seqs = engine.sim.max_num_seqs
            if engine.limits.kv_tokens / seqs < self._traffic.prompt + self._traffic.answer / 2.0:
                return "KV memory"
            full = float(engine.times.decode(float(seqs), 0.0))
            return "ITL" if full >= (self._service.itl or 0.0) else "batch limit"
        fewer, weights = serving.attainment(role, rates, workers), self._traffic.weights
        return "TTFT" if float(fewer.ttft @ weights) < float(fewer.itl @ weights) else "ITL"


def _search_rank(deployment: Deployment) -> tuple[float, float, int]:
    """Return what deployments are ordered by: price, then attainment in steps of 1 %, then the shorter pass."""
    chunk = sum(pool.sim.max_num_batched_tokens for pool in deployment.pools)
    return round(deployment.price, 6), -round(deployment.expected, 2), chunk
