"""Shadow desk: sends copies of answered requests to other models, compares what comes, and counts and records it.

A copy starts after its request's answer is whole, goes last in every queue, and a few run at a time: what does not fit
is left out and counted, so that clients never wait for one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.frontend.admin.admin_answers import ShadowStatus
from penstock.frontend.answer_filters import TimedAnswer
from penstock.frontend.prompt.model_names import ShadowOrder
from penstock.frontend.record_writer import RecordSink
from penstock.kernel.errors import PenstockError
from penstock_extras.shadows.shadow_answer import ReadAnswer, read_answer

log = logging.getLogger("penstock.frontend")

RUNNING_MAX = 8
"""Copies of one frontend process at engines at once: their answers lie in memory."""
LIMIT = 120.0
"""Seconds that a copy may take, its wait for a worker included."""

ShadowResult = Literal["same", "different", "failed", "skipped"]


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is recorded of an answer, never its text. Seconds after arrival; tokens as the engine counts them."""

    model: str
    characters: int = 0
    tokens: int | None = None
    finish: str | None = None
    tool_calls: tuple[str, ...] = ()
    ttft: float | None = None
    seconds: float | None = None


class ShadowRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``shadow.jsonl``. ``request``, ``copy``: ids for explain, of the client's request and of its copy.

    ``differs``: text, length, tool_calls, finish_reason.
    """

    request: str
    copy: str = ""
    name: str
    model: str
    result: ShadowResult
    differs: tuple[str, ...] = ()
    reason: str = ""
    answered: AnswerFacts | None = None
    shadow: AnswerFacts | None = None


Send = Callable[[ShadowOrder, str], Awaitable[TimedAnswer]]
"""Has a copy answered by a model; raises PenstockError where it can't be."""


class ShadowDesk:
    """The copies of one frontend process.

    Args:
        ready: returns how many workers of a model can take a request.
    """

    def __init__(self, metrics: FrontendMetrics, records: RecordSink, ready: Callable[[str], int]) -> None:
        self.counts: dict[tuple[str, str], ShadowStatus] = {}
        self._metrics = metrics
        self._records = records
        self._ready = ready
        self._tasks = BackgroundTasks()

    def begin(self, order: ShadowOrder, request: str, model: str, answered: TimedAnswer | None, send: Send) -> None:
        """A request has been answered: send its copies, or note why not.

        Args:
            request: its id.
            model: that answered it.
            answered: None where the answer was too long to be kept.
        """
        for shadow in order.models:
            reason = "" if answered is not None else "the answer is too long to be compared"
            reason = reason or ("" if self._ready(shadow) else f"no worker of {shadow} is ready")
            if len(self._tasks) >= RUNNING_MAX:
                reason = reason or f"{RUNNING_MAX} others are under way"
            if answered is None or reason:
                self._note(
                    ShadowRecord(request=request, name=order.name, model=shadow, result="skipped", reason=reason)
                )
                continue
            self._tasks.spawn(self._compare(order, request, model, shadow, answered, send))

    async def settled(self) -> None:
        """Wait until no copy is under way."""
        await self._tasks.settled()

    async def close(self) -> None:
        """Cancel all."""
        await self._tasks.close()

    async def _compare(
        self, order: ShadowOrder, request: str, model: str, shadow: str, answered: TimedAnswer, send: Send
    ) -> None:
        failed = ShadowRecord(request=request, name=order.name, model=shadow, result="failed")
        try:
            async with asyncio.timeout(LIMIT):
                copy = await send(order, shadow)
            first, second = (read_answer(each.raw, streamed=order.streamed) for each in (answered, copy))
        except TimeoutError:
            return self._note(msgspec.structs.replace(failed, reason=f"no answer within {LIMIT:g} s"))
        except PenstockError as error:
            return self._note(msgspec.structs.replace(failed, reason=error.message[:500]))
        except Exception:  # supervision boundary: nobody waits for this task
            log.exception("the copy of request %s to %s failed by a bug of ours", request, shadow)
            return self._note(msgspec.structs.replace(failed, reason="an internal error; the log has it"))
        differs = first.differs_in(second)
        self._note(
            ShadowRecord(
                request=request,
                copy=copy.id,
                name=order.name,
                model=shadow,
                result="different" if differs else "same",
                differs=differs,
                answered=_facts_of_answer(model, first, answered),
                shadow=_facts_of_answer(shadow, second, copy),
            )
        )

    def _note(self, record: ShadowRecord) -> None:
        counts = self.counts.setdefault((record.name, record.model), ShadowStatus(model=record.model, share=0.0))
        one = ShadowStatus(
            model=record.model,
            share=0.0,
            seconds=None if record.shadow is None else record.shadow.seconds,
            answered_seconds=None if record.answered is None else record.answered.seconds,
        )
        setattr(one, record.result, 1)
        counts.join(one)
        self._metrics.shadows.add(record.model, record.name, record.result)
        self._records.write(record)


def _facts_of_answer(model: str, answer: ReadAnswer, timed: TimedAnswer) -> AnswerFacts:
    return AnswerFacts(
        model=model,
        characters=sum(map(len, answer.texts.values())),
        tokens=answer.tokens,
        finish=next(iter(answer.finish.values()), None),
        tool_calls=tuple(name for calls in answer.calls.values() for name, _ in calls),
        ttft=None if timed.ttft is None else round(timed.ttft, 6),
        seconds=None if timed.seconds is None else round(timed.seconds, 6),
    )
