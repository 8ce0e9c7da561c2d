"""Audited exchange: a client's request whose prompt and answer go into the audit log as well."""

import time
from collections.abc import Callable, Mapping

from penstock.frontend.http.exchange_cover import ExchangeCover
from penstock.frontend.http.http_exchange import HttpExchange
from penstock_extras.audit.audit_entry import AuditEntry

ANSWER_MAX = 8 << 20
"""Bytes that are kept of an answer: longer than any model's output as text, streams with their frames included."""


class AuditedExchange(ExchangeCover):
    """One request whose answer is remembered; `record` writes both down."""

    def __init__(self, caller: HttpExchange, add: Callable[[AuditEntry], None]) -> None:
        super().__init__(caller)
        self._add = add
        self._at = time.time()
        self._answer: list[bytes] = []
        self._size = 0

    def record(self, prompt: bytes, tenant: str | None, model: str, endpoint: str, outcome: str | None) -> None:
        """Put the request into the log: it is over."""
        self._add(
            AuditEntry(
                id=self.id,
                at=self._at,
                tenant=tenant,
                key=self.name,
                model=model,
                endpoint=endpoint,
                outcome=outcome,
                status=self.status,
                prompt=prompt,
                answer=b"".join(self._answer)[:ANSWER_MAX],
                cut=self._size > ANSWER_MAX,
            )
        )

    def _keep(self, data: bytes) -> None:
        if self._size < ANSWER_MAX:
            self._answer.append(data)
        self._size += len(data)

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        self._keep(body)
        await super().send(status, body, headers, close=close)

    def write(self, data: bytes, *, last: bool = False) -> None:
        self._keep(data)
        super().write(data, last=last)
