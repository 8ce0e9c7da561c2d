"""vLLM stat logger: publishes what each forward pass did, from vLLM's public plug-in point; inert unless switched on.

vLLM loads every class under ``vllm.stat_logger_plugins`` in its API server. This one publishes what the scheduler
reports of each pass, where `STATS_ENV` names an endpoint and the server runs with
``--enable-logging-iteration-details``. The classes that vLLM hands in are declared unstable, so each field is read by
name and may be absent.
"""

import logging
import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.inside.stats_publisher import StatsPublisher, publisher_at
from penstock.kernel.pass_report import STATS_ENV, PassReport

log = logging.getLogger("vllm.penstock")
"""Below vLLM's own logger, so that our lines stand in its log."""

ITERATION_LOGGER = "vllm.v1.metrics.loggers"
ITERATION_WORDS = "Iteration(%d)"
"""In the line that vLLM logs for every pass once the details are on: hundreds a second, which we send instead."""


class PassLogger(StatLoggerBase):  # type: ignore[misc]
    """Publish every pass of one engine of this server. Its faults end it, never the engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._rank = engine_index
        self._publisher: StatsPublisher | None = None
        self._lacking = False
        try:
            endpoint = os.environ.get(STATS_ENV)
            if endpoint:
                self._publisher = publisher_at(endpoint, log)
                if self._publisher is not None:
                    quiet_iterations()
        except Exception:  # supervision boundary: a plug-in must not keep an engine from starting
            log.exception("statistics stay off")

    @property
    def active(self) -> bool:
        """Whether it publishes."""
        return self._publisher is not None

    def record(
        self,
        scheduler_stats: Any | None = None,
        iteration_stats: Any | None = None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
        **later: Any,
    ) -> None:
        """Take what vLLM measured of one pass."""
        publisher = self._publisher
        if publisher is None or scheduler_stats is None:
            return
        try:
            details = getattr(scheduler_stats, "iteration_details", None)
            if details is None:
                self._say_lacking()
            elif not getattr(details, "is_dummy", False):
                told = pass_report(details, scheduler_stats, iteration_stats, self._rank, publisher.next_number())
                publisher.publish(told)
        except Exception:  # supervision boundary: see the module's first lines
            self._publisher = None
            log.exception("statistics are switched off after a fault")

    def log_engine_initialized(self) -> None:
        """Log nothing; vLLM calls this on every stat logger."""

    def _say_lacking(self) -> None:
        if not self._lacking:
            self._lacking = True
            log.warning("no details of passes come from vLLM: start it with --enable-logging-iteration-details")


def pass_report(details: Any, scheduler: Any, iteration: Any, rank: int, number: int) -> PassReport:
    """Return the message for one pass.

    Raises:
        AttributeError: vLLM has other names now for what a pass did.
    """
    waiting = getattr(scheduler, "num_waiting_reqs", None)
    if waiting is not None:
        waiting += getattr(scheduler, "num_skipped_waiting_reqs", 0)
    return PassReport(
        rank=rank,
        number=number,
        wall=details.elapsed_ms / 1e3,
        prefill_requests=details.num_ctx_requests,
        prefill_tokens=details.num_ctx_tokens,
        decode_seqs=details.num_generation_requests,
        decode_tokens=details.num_generation_tokens,
        waiting=waiting,
        running=getattr(scheduler, "num_running_reqs", None),
        kv_usage=getattr(scheduler, "kv_cache_usage", None),
        preemptions=getattr(iteration, "num_preempted_reqs", None),
    )


def quiet_iterations() -> None:
    """Keep vLLM's one line per pass out of its log; it goes on logging everything else."""
    target = logging.getLogger(ITERATION_LOGGER)
    if not any(isinstance(known, _NoIterations) for known in target.filters):
        target.addFilter(_NoIterations())


class _NoIterations(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return ITERATION_WORDS not in str(record.msg)
