"""Encode stage: has the media of a request encoded by an encode worker, one request for each, as vLLM's own proxy does.

The worker puts what it makes where the others find it by the content's name; nothing comes back but that it is done.
"""

import asyncio
import time

import msgspec

from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import EngineCall, EngineCalls
from penstock.config.settings.frontend_settings import UpstreamSettings
from penstock.frontend.cluster_view import ClusterView, RequestTicket
from penstock.frontend.exchange.open_attempts import OpenAttempts, WorkerAbsence
from penstock.frontend.exchange.upstream_request import UpstreamRequest, engine_fields, error_text
from penstock.frontend.prompt.request_body import media_of
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject
from penstock.router.events import Dispatch

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
        ticket: RequestTicket,
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
                    f"worker {dispatch.target}: {_first(errors).message}",
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


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, EngineError)
    return found
