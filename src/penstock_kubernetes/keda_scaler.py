"""KEDA scaler: answers KEDA, which scales a pool to the planner's recommendation where an HPA should do the scaling.

The metric of a pool is how many replicas it should have, with a target of 1 for each replica, so that the HPA comes to
the same number. A recommendation that is too old is no answer: KEDA then leaves the pool as it is.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from penstock.adapters.listen_address import listen_hint
from penstock.kernel.errors import ConfigError
from penstock_extras.plugins.protobuf_messages import KEDA, handler_of, message, need_grpc

METRIC = "penstock-planner-pool-target"
AGE_MAX = 60.0
"""Seconds after which a recommendation counts no more: as long as a source that can't be read counts as stale."""


class KedaScaler:
    """Serves the recommendations that `recommend` was given: `start`, then `close`.

    Args:
        interval: seconds between two recommendations; an answer may be older than `AGE_MAX` where this is long.
        clock: seconds, any origin.
    """

    def __init__(self, *, interval: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._age_max = max(AGE_MAX, 3 * interval)
        self._clock = clock
        self._targets: dict[str, tuple[int, float]] = {}
        """Pool -> its replicas, and since when."""
        self._serial = 0
        """How many recommendations there were."""
        self._news = asyncio.Condition()
        self._server: Any = None

    async def recommend(self, targets: Mapping[str, int]) -> None:
        """Take the newest recommendations; pools that are not named keep theirs until it is too old."""
        now = self._clock()
        self._targets |= {pool: (replicas, now) for pool, replicas in targets.items()}
        async with self._news:
            self._serial += 1
            self._news.notify_all()

    async def start(self, listen: str) -> int:
        """Serve at HOST:PORT; return the port.

        Raises:
            ConfigError: gRPC is missing, or the address can't be bound.
        """
        self._server = need_grpc().aio.server()
        answers = {"IsActive": self._active, "GetMetricSpec": self._spec, "GetMetrics": self._metrics}
        streams = {"StreamIsActive": self._actives}
        handler = handler_of("ExternalScaler", answers, streams=streams, package=KEDA)
        self._server.add_generic_rpc_handlers((handler,))
        try:
            port = int(self._server.add_insecure_port(listen))
        except RuntimeError as error:
            raise ConfigError(
                f"planner.external_scaler_port at {listen} can't be bound: {error}",
                hint=listen_hint(listen, "choose one that is free, or 0 for none"),
            ) from error
        await self._server.start()
        return port

    async def close(self) -> None:
        """End."""
        if self._server is not None:
            await self._server.stop(grace=1.0)

    async def _active(self, question: Any, context: Any) -> Any:
        return message("IsActiveResponse", KEDA)(result=await self._target(question, context) > 0)

    async def _actives(self, question: Any, context: Any) -> AsyncIterator[Any]:
        before: bool | None = None
        while True:
            known = self._serial
            active = await self._target(question, context) > 0
            if active != before:
                yield message("IsActiveResponse", KEDA)(result=active)
                before = active
            async with self._news:  # what came while the answer went out is news as well
                while self._serial == known:
                    await self._news.wait()

    async def _spec(self, question: Any, context: Any) -> Any:
        spec = message("MetricSpec", KEDA)(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return message("GetMetricSpecResponse", KEDA)(metricSpecs=[spec])

    async def _metrics(self, question: Any, context: Any) -> Any:
        target = await self._target(question.scaledObjectRef, context)
        name = question.metricName or METRIC
        value = message("MetricValue", KEDA)(metricName=name, metricValue=target, metricValueFloat=float(target))
        return message("GetMetricsResponse", KEDA)(metricValues=[value])

    async def _target(self, reference: Any, context: Any) -> int:
        """Return the recommendation for the pool that a ScaledObject names; the call ends where there is none."""
        codes = need_grpc().StatusCode
        pool = reference.scalerMetadata.get("pool", "")
        if pool not in self._targets:
            pools = ", ".join(self._targets) or "none yet"
            code = codes.INVALID_ARGUMENT if self._targets else codes.UNAVAILABLE
            await context.abort(code, f"the metadata of {reference.name} names pool {pool!r}; the pools are {pools}")
        replicas, since = self._targets[pool]
        age = self._clock() - since
        if age > self._age_max:
            await context.abort(codes.UNAVAILABLE, f"the recommendation for {pool} is {age:.0f} s old")
        return replicas
