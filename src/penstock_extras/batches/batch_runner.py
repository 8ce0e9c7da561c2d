"""Batch runner: answers the requests of batches where the cluster has nothing better to do.

A request starts only while few requests are at the workers and none waits, so live traffic pushes batches aside; one
that runs goes last in queues. What an answer says is on disk before the next look at progress: a runner that is killed
loses only what was at engines, and its successor sends that again.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.frontend.http.error_responses import problem_of
from penstock.frontend.http.http_exchange import CollectedExchange
from penstock.frontend.http.request_gate import Handler, internal
from penstock.frontend.service import Service
from penstock.kernel.errors import PenstockError
from penstock_extras.batches.batch_answers import (
    ENDED,
    Batch,
    LineCounts,
    LineError,
    LineErrors,
    LineResponse,
    LineResult,
)
from penstock_extras.batches.batch_claim import BatchClaim
from penstock_extras.batches.batch_folder import BatchFolder
from penstock_extras.batches.batch_input import LinePlace, read_places, read_request

log = logging.getLogger("penstock.batches")

LOOK = 2.0
"""Seconds between looks for batches while none runs."""
PACE = 0.1
"""Seconds between looks at the load while one runs."""
SAVE = 1.0
"""Seconds after which results and progress are written."""
PER_WORKER = 2
"""Requests at a worker, live ones included, below which it counts as idle."""
BATCHES_MAX = 8
"""Most batches that run at once, so that a small one need not wait for a large one; the next ones wait."""
RUNNING_MAX = 64
"""Most requests of batches at engines, whatever the number of workers: their answers lie in memory."""
PAUSE = 0.5
"""Seconds before a line is sent again; twice as many each time."""
TRIES_MAX = 6
"""Sends of one line before an engine's failure becomes its result."""
RETRIED = frozenset({429, 502, 503, 504})


@dataclass(slots=True, eq=False)
class BatchProgress:
    """A batch that runs here. ``places``: requests that have no result yet."""

    batch: Batch
    places: list[LinePlace]
    completed: int = 0
    failed: int = 0
    fresh: list[LineResult] = field(default_factory=list)
    """Results that are not on disk yet."""
    running: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self, result: LineResult) -> None:
        self.fresh.append(result)
        self.count(result)

    def count(self, result: LineResult) -> None:
        if result.succeeded:
            self.completed += 1
        else:
            self.failed += 1


class BatchRunner:
    """Runs the batches of a folder, the oldest first.

    Args:
        handlers: of POST, by path: what a client's request would meet.
        claim: None where this process is the only one.
    """

    def __init__(
        self, service: Service, folder: BatchFolder, handlers: Mapping[str, Handler], claim: BatchClaim | None
    ) -> None:
        self._service = service
        self._folder = folder
        self._handlers = handlers
        self._claim = claim
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._sent = 0
        """Requests of all batches that are at engines."""
        self.look = asyncio.Event()
        """Set where there may be something new to do."""

    async def run(self) -> None:
        """Run batches until cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except (StoreUnavailable, OSError) as error:
                    log.warning("no new batch begins: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.look.wait(), LOOK)
                self.look.clear()
        finally:
            await cancel_all(self._batches.values())
            if self._claim is not None:
                with contextlib.suppress(StoreUnavailable):  # its key ends by itself
                    await self._claim.release()

    async def _look(self) -> None:
        """Begin the oldest batches that nobody runs, or leave all to the process that has the claim."""
        if self._claim is not None and not await self._claim.take():
            await cancel_all(self._batches.values())
            return
        for batch in reversed(await asyncio.to_thread(self._folder.batches)):
            if batch.status not in ENDED and batch.id not in self._batches and len(self._batches) < BATCHES_MAX:
                task = asyncio.create_task(self._batch(batch), name=f"batch {batch.id}")
                self._batches[batch.id] = task
                task.add_done_callback(lambda _, id=batch.id: self._batches.pop(id, None))  # type: ignore[misc]

    async def _batch(self, batch: Batch) -> None:
        """Run one batch; after an error of the disk the next look begins it again where it was."""
        try:
            progress = await asyncio.to_thread(self._begin, batch)
            if progress is None:
                return
            try:
                await self._carry_out(progress)
            finally:
                await cancel_all(progress.running)
                await asyncio.to_thread(self._save, progress)
            await asyncio.to_thread(self._end, progress)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("batch %s waits: %s", batch.id, error)

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> BatchProgress | None:
        """Read what is left to do of a batch; None where its input is wrong and it has failed."""
        now = int(time.time())
        places, errors = read_places(
            self._folder.content(batch.input_file_id), batch.endpoint, self._service.settings.frontend.limits.body_max
        )
        if errors:
            listed = LineErrors(data=errors)
            self._folder.save(msgspec.structs.replace(batch, status="failed", failed_at=now, errors=listed))
            return None
        if batch.in_progress_at is None:
            counts = LineCounts(total=len(places))
            batch = msgspec.structs.replace(batch, status="in_progress", in_progress_at=now, request_counts=counts)
            self._folder.save(batch)
        progress = BatchProgress(batch, [])
        answered = set()
        for result in self._folder.results(batch.id):
            answered.add(result.custom_id)
            progress.count(result)
        progress.places = [place for place in places if place.custom_id not in answered]
        progress.places.reverse()
        return progress

    def _save(self, progress: BatchProgress) -> None:
        """Write results first, then how many there are."""
        results, progress.fresh = progress.fresh, []
        if results:
            self._folder.append(progress.batch.id, results)
        counts = LineCounts(
            total=progress.batch.request_counts.total, completed=progress.completed, failed=progress.failed
        )
        progress.batch = msgspec.structs.replace(progress.batch, request_counts=counts)
        self._folder.save(progress.batch)

    def _end(self, progress: BatchProgress) -> None:
        """Give what has no answer its reason, and make the output files."""
        now, batch = int(time.time()), progress.batch
        cancelled = self._folder.cancelled_at(batch.id)
        left, progress.places = progress.places, []
        if left and cancelled is None:
            why = LineError(code="batch_expired", message="the completion window ended before this request ran")
            for place in left:
                progress.take(
                    LineResult(id=f"batch_req_{place.start}", custom_id=place.custom_id, response=None, error=why)
                )
            self._save(progress)
        output, error = self._folder.finish(batch)
        batch = msgspec.structs.replace(progress.batch, output_file_id=output, error_file_id=error, finalizing_at=now)
        if cancelled is not None:
            batch = msgspec.structs.replace(batch, status="cancelled", cancelling_at=cancelled, cancelled_at=now)
        elif left:
            batch = msgspec.structs.replace(batch, status="expired", expired_at=now)
        else:
            batch = msgspec.structs.replace(batch, status="completed", completed_at=now)
        self._folder.save(batch)
        self._folder.forget_results(batch.id)

    # --- on the event loop --------------------------------------------------------------------------------------------

    async def _carry_out(self, progress: BatchProgress) -> None:
        """Send requests while there is room, until all are answered, the window ends or somebody cancels."""
        saved = time.monotonic()
        while progress.places or progress.running:
            if time.time() >= progress.batch.expires_at:
                return
            while progress.places and self._room():
                place = progress.places.pop()
                task = asyncio.create_task(self._line(progress, place), name=f"line of {progress.batch.id}")
                progress.running.add(task)
                task.add_done_callback(progress.running.discard)
                self._sent += 1
            if progress.running:
                await asyncio.wait(progress.running, timeout=PACE, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(PACE)
            if time.monotonic() - saved >= SAVE:
                saved = time.monotonic()
                await asyncio.to_thread(self._save, progress)
                if await asyncio.to_thread(self._folder.cancelled_at, progress.batch.id) is not None:
                    return

    def _room(self) -> bool:
        """Return whether the cluster is idle enough for one more request."""
        if self._sent >= RUNNING_MAX or self._service.gate.draining or self._service.gate.retiring:
            return False
        status = self._service.cluster.status()
        if any(queue.length for queue in status.queue.values()):
            return False
        workers = [worker for worker in status.workers if worker.why_not is None]
        return max(self._sent, sum(worker.active_requests for worker in workers)) < PER_WORKER * len(workers)

    async def _line(self, progress: BatchProgress, place: LinePlace) -> None:
        """Answer one request; one that is cancelled counts as not sent."""
        try:
            line = await asyncio.to_thread(read_request, self._folder.content(progress.batch.input_file_id), place)
            for attempt in range(1, TRIES_MAX + 1):
                name = str(progress.batch.owner or "batch")
                exchange = CollectedExchange(self._service.new_id(), line.url, name, bytes(line.body))
                await self._answer(exchange)
                if exchange.status not in RETRIED or attempt == TRIES_MAX:
                    break
                await asyncio.sleep(random.uniform(0.5, 1.0) * PAUSE * 2 ** (attempt - 1))
            progress.take(_line_result(exchange, place))
        except (asyncio.CancelledError, OSError):
            progress.places.append(place)
            raise
        finally:
            self._sent -= 1

    async def _answer(self, exchange: CollectedExchange) -> None:
        try:
            await self._handlers[exchange.path](exchange)
        except PenstockError as error:
            refusal = problem_of(error)
            exchange.status, exchange.answer = refusal.status, refusal.body
        except Exception:  # supervision boundary: one request's bug must not end its batch
            log.exception("request %s of a batch failed by a bug of ours", exchange.id)
            refusal = internal()
            exchange.status, exchange.answer = refusal.status, refusal.body


def _line_result(exchange: CollectedExchange, place: LinePlace) -> LineResult:
    id = f"batch_{exchange.id.replace('-', '_')}"
    try:
        msgspec.json.decode(exchange.answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        why = LineError(code="invalid_answer", message=f"the answer of status {exchange.status} is not JSON")
        return LineResult(id=id, custom_id=place.custom_id, response=None, error=why)
    # An engine's answer may have line ends between its fields, and a result is one line.
    body = exchange.answer if b"\n" not in exchange.answer else msgspec.json.format(exchange.answer, indent=-1)
    response = LineResponse(status_code=exchange.status or 502, request_id=exchange.id, body=msgspec.Raw(body))
    return LineResult(id=id, custom_id=place.custom_id, response=response)
