"""Prefill stages: run a request's legs before the last, keep the KV that they made, and release it if unwanted.

They run apart from the client's connection: a client that hangs up must not leave KV behind that no worker fetches. KV
that an engine holds for another is fetched either by the leg that answers, or by one that is sent only for that
(`Release`). An encode worker gets the media of a request first, one request for each, as vLLM's own proxy does; it puts
what it makes where the others find it by the content's name, so nothing comes back but that it is done.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.dialects.kv_transfer_protocol import (
    HANDOVERS,
    Fields,
    KvTransferProtocol,
    lease_of,
    one_token,
)
from penstock.adapters.engines.http.engine_call import (
    CallStopped,
    ConnectFailed,
    EngineBroken,
    EngineCall,
    EngineCalls,
    EngineUnreachable,
)
from penstock.adapters.task_cancel import cancel_all
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.frontend_settings import UpstreamSettings
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.exchange.open_attempts import STOPPED, OpenAttempts, WorkerAbsence, adapter_ready
from penstock.frontend.exchange.sse import cached_tokens, usage_of
from penstock.frontend.exchange.upstream_request import UpstreamRequest, engine_fields, error_text
from penstock.frontend.prompt.request_body import media_of
from penstock.kernel.errors import EngineError, InvariantError
from penstock.kernel.values import JsonObject, RequestId, WorkerCard
from penstock.router.events import Abort, Dispatch, Handoff, Release
from penstock.runtime.node.tickets import Ticket

AT_ONCE_MAX = 8
"""Media of one request that are encoded at the same time."""
_KEPT = ("model", "mm_processor_kwargs", "media_io_kwargs")
"""Fields of the request that decide what is encoded, and under which name."""


class EncodeStage:
    """One leg without output: every medium that its `Dispatch` names.

    Args:
        headers: for the engine.
        limits: on its time and on its silence.
    """

    def __init__(
        self,
        engines: EngineCalls,
        cluster: ClusterView,
        attempts: OpenAttempts,
        ticket: Ticket,
        dispatch: Dispatch,
        job: UpstreamRequest,
        adapter: str | None,
        headers: dict[str, str],
        limits: UpstreamSettings,
    ) -> None:
        self._attempts = attempts
        self._ticket = ticket
        self._dispatch = dispatch
        self._dialect = dialect_of(dispatch.card.engine)
        self._limits = limits
        self._began = time.monotonic()
        self._absence = WorkerAbsence(cluster, dispatch.card)
        self.gave_up = False
        self._calls: list[EngineCall] = [
            engines.call(dispatch.card.url, job.path, msgspec.json.encode(body), headers)
            for body in encode_bodies(job, dispatch, adapter)
        ]
        self._status: int | None = None
        self._kind = "fault"

    async def run(self) -> None:
        """Send the media to the engine and post what came of it to the router."""
        dispatch, ticket = self._dispatch, self._ticket
        key = (ticket.id, dispatch.attempt)
        self._attempts.open[key] = self
        limit = asyncio.Semaphore(AT_ONCE_MAX)
        try:
            async with asyncio.TaskGroup() as group:
                for call in self._calls:
                    group.create_task(self._encode(call, limit))
            ticket.staged(dispatch.attempt, kv_retained=False, cached=None)
        except* EngineError as errors:
            if not self.gave_up:
                ticket.failed(
                    f"worker {dispatch.target}: {_first_engine_error(errors).message}",
                    retryable=True,  # whatever it was, the worker that prefills can do this itself
                    worker_at_fault=self._kind == "fault",
                    status=self._status,
                    leaving=self._kind == "leaving",
                    attempt=dispatch.attempt,
                )
        finally:
            del self._attempts.open[key]
            for call in self._calls:
                call.close()

    def stop(self, reason: str) -> None:
        """Stop the stage, by order of the router."""
        self.gave_up = True
        self._stop(reason)

    async def look(self, now: float) -> None:
        """Stop a stage that takes too long, or whose worker is gone."""
        if now - self._began > self._limits.first_byte_timeout:
            self._stop(f"no answer within {self._limits.first_byte_timeout} s")
        if self._absence.beyond(self._limits.quiet_timeout, now):
            self._stop("its worker is gone")

    def _stop(self, reason: str) -> None:
        for call in self._calls:
            call.stop(reason)

    async def _encode(self, call: EngineCall, limit: asyncio.Semaphore) -> None:
        async with limit:
            await call.begin()
            body = await call.read()
        if call.status >= 400:
            text = error_text(body)
            self._status, self._kind = call.status, self._dialect.refusal(call.status, text)
            raise EngineError(f"the engine answered {call.status}: {text}")


def encode_bodies(job: UpstreamRequest, dispatch: Dispatch, adapter: str | None) -> list[JsonObject]:
    """Return what an encode worker is asked: a chat of one message with nothing but one medium, for one token."""
    assert job.parsed is not None  # only chats have media
    fields = engine_fields(job, dispatch, adapter)
    kept = {name: fields[name] for name in _KEPT if name in fields}
    parts = media_of(fields)
    return [
        {
            **kept,
            "messages": [{"role": "user", "content": [parts[place]]}],
            "max_tokens": 1,
            "stream": False,
        }
        for place in dispatch.encode
    ]


def _first_engine_error(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, EngineError)
    return found


log = logging.getLogger("penstock.frontend")

OWED_MAX = 1024
"""Most held prefills that are remembered until a worker can fetch them."""
RELEASE_LIMIT = 60.0
"""Seconds that a fetch for a release may take."""
SENT_WITHIN = 0.8
"""Share of a lease within which a leg that is to fetch KV must be sent; the rest is for engines that stand still."""
FETCH_LIMIT = 60.0
"""Seconds that a leg whose client has gone may take to fetch what is held for it."""


@dataclass(slots=True)
class PrefillResult:
    """What a stage left for the next one, and the request for that one."""

    attempt: int
    source: WorkerCard
    fields: Fields | None
    request_fields: JsonObject
    path: str
    headers: dict[str, str]
    taken_by: int = 0
    """The last attempt that was sent to fetch it."""
    until: float = math.inf
    """When its holder may let it go (`time.monotonic`)."""

    @property
    def aged(self) -> bool:
        """Whether no leg may be sent any more to fetch it."""
        return time.monotonic() > self.until - lease_of(self.source) * (1 - SENT_WITHIN)


class PrefillStages:
    """All stages before the last, of one frontend process.

    Args:
        attempts: where a stage is known while it is open.
        live_settings: returns the settings as they are now.
    """

    def __init__(
        self,
        engines: EngineCalls,
        cluster: ClusterView,
        attempts: OpenAttempts,
        live_settings: Callable[[], ClusterSettings],
    ) -> None:
        self.engines = engines
        self.cluster = cluster
        self.attempts = attempts
        self.live_settings = live_settings
        self.made: dict[RequestId, PrefillResult] = {}
        self._releases: dict[tuple[RequestId, int], Release] = {}
        """Stages that were released before they were done."""
        self._owed: dict[tuple[RequestId, int], PrefillResult] = {}
        """Released KV without a worker that could fetch it."""
        self._running: set[tuple[RequestId, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.released = 0
        """Legs that were sent only to release KV."""
        self.release_failures = 0

    def start(
        self,
        ticket: Ticket,
        dispatch: Dispatch,
        job: UpstreamRequest,
        adapter: str | None,
        headers: dict[str, str],
    ) -> None:
        """Carry out one stage; its result is posted to the router.

        Args:
            adapter: the requested LoRA adapter of the model.
            headers: for the engine.
        """
        if dispatch.stage == "encode":
            upstream = self.live_settings().frontend.upstream
            stage = EncodeStage(
                self.engines, self.cluster, self.attempts, ticket, dispatch, job, adapter, headers, upstream
            )
            return self._spawn(stage.run(), f"encode-{ticket.id}")
        self._running.add((ticket.id, dispatch.attempt))
        self._spawn(_PrefillStage(self, ticket, dispatch, job, adapter, headers).run(), f"stage-{ticket.id}")

    def taken_by(self, dispatch: Dispatch, request: RequestId) -> PrefillResult | None:
        """Return what a leg of stage ``decode`` is to fetch; None where nothing was made for it."""
        made = self.made.get(request)
        if made is None or dispatch.handoff is None or made.attempt != dispatch.handoff.source_attempt:
            return None
        if made.aged:
            log.warning("KV of %s on %s is near its lease's end: it is computed anew", request, made.source.id)
            return None
        made.taken_by = dispatch.attempt
        return made

    def fields_for(self, dispatch: Dispatch, made: PrefillResult | None) -> Fields:
        """Return the body fields for a leg of stage ``decode`` that fetches this."""
        assert dispatch.handoff is not None
        handover = handover_of(dispatch.handoff, dispatch.card.engine)
        return handover.decode(None if made is None else made.fields, dispatch.handoff)

    def done(self, request: RequestId, made: PrefillResult) -> None:
        """Keep what a stage made until it has been fetched."""
        self._running.discard((request, made.attempt))
        release = self._releases.pop((request, made.attempt), None)
        if release is None:
            self.made[request] = made
        elif release.target is None:
            self._owed[request, made.attempt] = made
        elif made.fields is not None:
            self._spawn(self._fetch(release, made), f"release-{request}")

    def failed(self, request: RequestId, attempt: int) -> None:
        """A stage made nothing."""
        self._running.discard((request, attempt))
        self._releases.pop((request, attempt), None)

    def release(self, effect: Release) -> None:
        """Release the KV that a stage made, or will have made: let it be fetched and dropped."""
        key = (effect.id, effect.attempt)
        if key in self._running:
            self._releases[key] = effect
            return
        made = self._owed.pop(key, None) or self.made.pop(effect.id, None)
        if made is not None and effect.target is None:
            self._owed[key] = made  # the router repeats it once there is a worker that could fetch it
            if len(self._owed) > OWED_MAX:
                del self._owed[next(iter(self._owed))]
        elif made is not None and made.fields is not None and made.attempt == effect.attempt:
            self._spawn(self._fetch(effect, made), f"release-{effect.id}")

    def aborted(self, effect: Abort) -> None:
        """A leg was stopped; one that had not been sent yet fetches nothing, so another has to."""
        made = self.made.get(effect.id)
        if made is None or made.fields is None or made.taken_by == effect.attempt:
            return
        cards = {card.id: card for card in self.cluster.cards()}
        target = cards.get(effect.target.worker)
        if target is not None:
            del self.made[effect.id]
            release = Release(id=effect.id, attempt=made.attempt, source=made.source, target=target)
            self._spawn(self._fetch(release, made), f"release-{effect.id}")

    def finish_fetch(
        self, dispatch: Dispatch, made: PrefillResult | None, call: EngineCall, begun: "asyncio.Task[None]"
    ) -> None:
        """Let a leg fetch what is held for it although its client has gone, then end it; if it can't, let another."""
        self._spawn(self._complete_fetch(dispatch, made, call, begun), "seen-off")

    async def close(self) -> None:
        """Cancel all stages."""
        await cancel_all(self._tasks)

    async def _fetch(self, effect: Release, made: PrefillResult) -> None:
        assert effect.target is not None
        if made.aged:
            return  # its holder lets it go by itself, and what took its place must get into no cache
        handoff = Handoff(protocol="completed", key=0, source=effect.source, source_attempt=effect.attempt)
        handover = handover_of(handoff, effect.target.engine)
        # The request once more, for one token: the engine fetches the KV to make it, and the holder releases it.
        fields = {**made.request_fields, **handover.decode(made.fields, handoff)}
        call = self.engines.call(effect.target.url, made.path, msgspec.json.encode(fields), made.headers)
        try:
            async with asyncio.timeout(RELEASE_LIMIT):
                await call.begin()
                body = await call.read()
            if call.status >= 400:
                raise EngineError(f"it answered {call.status}: {error_text(body)}")
            self.released += 1
        except (EngineError, TimeoutError) as error:
            self.release_failures += 1
            log.warning("KV of request %s on %s may stay held: %s", effect.id, effect.source.id, error)
        finally:
            call.close()

    async def _complete_fetch(
        self, dispatch: Dispatch, made: PrefillResult | None, call: EngineCall, begun: "asyncio.Task[None]"
    ) -> None:
        try:
            async with asyncio.timeout(FETCH_LIMIT):
                await begun
                if call.status >= 400:
                    raise EngineError(f"it answered {call.status}")
                while b'"choices":[{' not in (piece := await call.next()).replace(b" ", b""):
                    if not piece:
                        raise EngineError("it ended without a token")
        except (EngineError, TimeoutError) as error:
            log.info("a leg whose client had gone ended before its first token: %s", error)
            other = self._like(dispatch.card)
            if made is not None and made.fields is not None and other is not None:
                await self._fetch(Release(id=dispatch.id, attempt=made.attempt, source=made.source, target=other), made)
        finally:
            begun.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await begun
            call.close()

    def _like(self, card: WorkerCard) -> WorkerCard | None:
        """Return another worker that can fetch what this one could not."""
        return next(
            (
                other
                for other in self.cluster.cards()
                if other.id != card.id
                and (other.model, other.role, other.handoff, other.layout)
                == (card.model, card.role, card.handoff, card.layout)
            ),
            None,
        )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed by a bug of ours", task.get_name(), exc_info=error)


class _PrefillStage:
    """One leg without output to the client."""

    def __init__(
        self,
        stages: PrefillStages,
        ticket: Ticket,
        dispatch: Dispatch,
        job: UpstreamRequest,
        adapter: str | None,
        headers: dict[str, str],
    ) -> None:
        self._stages = stages
        self._ticket = ticket
        self._dispatch = dispatch
        self._adapter = adapter
        fields = engine_fields(job, dispatch, adapter)
        handoff = dispatch.handoff
        assert handoff is not None
        self._handover: KvTransferProtocol = handover_of(handoff, dispatch.card.engine)
        fields = self._handover.prefill(fields, handoff, dispatch.card)
        self._made = PrefillResult(dispatch.attempt, dispatch.card, None, one_token(fields), job.path, headers)
        self._call = stages.engines.call(dispatch.card.url, job.path, msgspec.json.encode(fields), headers)
        self._began = time.monotonic()
        self._absence = WorkerAbsence(stages.cluster, dispatch.card)
        self.gave_up = False

    async def run(self) -> None:
        """Send the leg to the engine and post its result to the router."""
        call, dispatch, ticket = self._call, self._dispatch, self._ticket
        key = (ticket.id, dispatch.attempt)
        if self._adapter is not None and not await self._has_adapter(self._adapter):
            self._stages.failed(*key)
            return call.close()
        self._stages.attempts.open[key] = self
        try:
            await call.begin()
            body = await call.read()
            if call.status >= 400:
                return self._refused(body)
            self._made.fields = self._handover.decode_params(_decoded_json_object(body))
            # Its lease began before we read of it, and long before if its engine stood still after that.
            self._made.until = self._began + lease_of(dispatch.card)
            kv_retained = self._made.fields is not None
            self._stages.done(ticket.id, self._made)
            ticket.staged(dispatch.attempt, kv_retained=kv_retained, cached=cached_tokens(usage_of(body)))
        except (EngineUnreachable, EngineBroken, CallStopped) as error:
            self._failed(error.message, received=not isinstance(error, ConnectFailed))
        finally:
            del self._stages.attempts.open[key]
            self._stages.failed(*key)  # no effect where it is done
            call.close()

    async def _has_adapter(self, adapter: str) -> bool:
        """Wait until the worker has loaded the request's LoRA adapter; False where that failed."""
        stages, ticket = self._stages, self._ticket
        failure = await adapter_ready(stages.cluster, stages.attempts, ticket.id, self._dispatch, adapter)
        self._began = time.monotonic()
        if failure is not None and failure is not STOPPED:
            self._failed(failure.reason, at_fault=False, status=failure.status)
        return failure is None

    def stop(self, reason: str) -> None:
        """Stop the stage, by order of the router."""
        self.gave_up = True
        self._call.stop(reason)

    async def look(self, now: float) -> None:
        """Stop a stage that takes too long, or whose worker is gone."""
        upstream = self._stages.live_settings().frontend.upstream
        if now - self._began > upstream.first_byte_timeout:
            self._call.stop(f"no answer within {upstream.first_byte_timeout} s")
        if self._absence.beyond(upstream.quiet_timeout, now):
            self._call.stop("its worker is gone")

    def _refused(self, body: bytes) -> None:
        status, text = self._call.status, error_text(body)
        kind = dialect_of(self._dispatch.card.engine).refusal(status, text)
        self._failed(
            f"the engine answered {status}: {text}",
            retryable=kind != "client",
            at_fault=kind == "fault",
            status=status,
            leaving=kind == "leaving",
        )

    def _failed(
        self,
        reason: str,
        *,
        retryable: bool = True,
        at_fault: bool = True,
        status: int | None = None,
        leaving: bool = False,
        received: bool = True,
    ) -> None:
        if self.gave_up:
            return
        self._ticket.failed(
            f"worker {self._dispatch.target}: {reason}",
            retryable=retryable,
            worker_at_fault=at_fault,
            status=status,
            leaving=leaving,
            received=received,
            attempt=self._dispatch.attempt,
        )


def handover_of(handoff: Handoff, engine: str) -> KvTransferProtocol:
    """Return an engine kind's part in a hand-off; the router admits only engines that have one.

    Raises:
        InvariantError: there is no such protocol.
    """
    protocol = HANDOVERS.get((handoff.protocol, engine))
    if protocol is None:
        raise InvariantError(f"an engine of kind {engine} takes part in no hand-off of protocol {handoff.protocol}")
    return protocol


def _decoded_json_object(body: bytes) -> JsonObject:
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise EngineBroken(f"the engine's answer is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
