"""Measured prefill: how fast an engine computes prompts, from the passes that our plug-in in it publishes.

vLLM does not tell its tiers how long a prompt takes, so the plug-in behind its tiering names the endpoint of the
statistics plug-in beside it, and the tier process listens there. Then blocks are loaded only where that takes less
time than to compute them.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from penstock.adapters.engines.stats.step_stats_plugin import PassSubscriber
from penstock.adapters.task_cancel import end
from penstock.kernel.pass_report import PassReport
from penstock_kv.inside.tier_protocol import SPEED_PERIOD, SPEED_TOKENS

log = logging.getLogger("penstock.kv_tiers")


class MeasuredPrefill:
    """One engine's speed, while it is connected.

    Args:
        endpoint: where its passes are published.
        report: takes seconds per token whenever they are lower than before: loading has to beat the engine at its best.
    """

    def __init__(self, endpoint: str, report: Callable[[float], None]) -> None:
        self._report = report
        self._best = float("inf")
        self._reported = -SPEED_PERIOD
        self._passes: PassSubscriber | None = None
        self._listening: asyncio.Task[None] | None = None
        try:
            # A plug-in that binds to every address is reached at this machine's own.
            self._passes = PassSubscriber(endpoint.replace("//*:", "//127.0.0.1:"), self.heard)
        except zmq.ZMQError as error:
            log.warning("prefill speed stays unknown: %r can't be listened to: %s", endpoint, error)
        else:
            self._listening = asyncio.create_task(self._passes.run(), name=f"passes-{endpoint}")

    def heard(self, report: PassReport) -> None:
        """Take a pass: those that are mostly prefill tell the speed."""
        tokens = report.prefill_tokens
        if tokens < SPEED_TOKENS or report.decode_tokens >= tokens or report.wall <= 0:
            return
        self._best = min(self._best, report.wall / (tokens + report.decode_tokens))
        now = time.monotonic()
        if now - self._reported > SPEED_PERIOD:
            self._reported = now
            self._report(self._best)

    async def close(self) -> None:
        """Stop listening."""
        if self._listening is not None and self._passes is not None:
            await end((self._listening,))
            self._passes.close()
