"""Answer filters: what a companion puts between a request and its client, and what it does once it is over."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.config.settings.tenant_settings import AuditSettings
from penstock.frontend.admin.admin_answers import ShadowStatus
from penstock.frontend.http.http_exchange import AnswerFilter, HttpExchange
from penstock.frontend.prompt.model_names import ShadowOrder
from penstock.kernel.values import WorkerCard


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A request's answer with its times: seconds after arrival, TTFT None where it was not streamed."""

    id: str
    raw: bytes
    ttft: float | None
    seconds: float | None


class AuditedAnswer(AnswerFilter, ABC):
    """One request that is written down."""

    @abstractmethod
    def record(self, prompt: bytes, tenant: str | None, model: str, endpoint: str, outcome: str | None) -> None:
        """Put the request into the log: it is over."""


class RequestAudit(Protocol):
    """Log of prompts and answers: `penstock_extras.audit.audit_log.AuditLog`."""

    settings: AuditSettings
    folder: Path
    lost: int
    failure: str

    def wants(self, tenant: str | None, model: str) -> bool: ...
    def check(self) -> None: ...
    def filter_of(self, caller: HttpExchange) -> AuditedAnswer: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class RequestCopies(Protocol):
    """Copies of answered requests at other models: `penstock_extras.shadows.shadow_desk.ShadowDesk`."""

    counts: dict[tuple[str, str], ShadowStatus]

    def begin(
        self,
        order: ShadowOrder,
        request: str,
        model: str,
        answered: TimedAnswer | None,
        send: Callable[[ShadowOrder, str], Awaitable[TimedAnswer]],
    ) -> None: ...
    async def close(self) -> None: ...


class EngineFiles(Protocol):
    """Files that lie at engines: `penstock_extras.jobs.engine_jobs.EngineJobs`."""

    async def with_engine_files(self, raw: bytes, owner: str) -> tuple[bytes, Any]: ...
    def engine(self, job: Any) -> WorkerCard: ...
    async def close(self) -> None: ...


class KeyVerifier(Protocol):
    """Accepts tokens of an issuer as keys: `penstock_extras.jwt.jwt_verifier.JwtVerifier`."""

    async def name(self, token: str) -> str: ...
    async def close(self) -> None: ...
