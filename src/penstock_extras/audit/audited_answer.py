"""Audited answer: remembers the answer to a client's request, and puts it with the prompt into the audit log."""

import time
from collections.abc import Callable

from penstock.frontend.answer_filters import AuditedAnswer
from penstock.frontend.http.http_exchange import HttpExchange, WholeAnswer
from penstock_extras.audit.audit_entry import AuditEntry

ANSWER_MAX = 8 << 20
"""Bytes that are kept of an answer: longer than any model's output as text, streams with their frames included."""


class RecordedAnswer(AuditedAnswer):
    """The answer to one request; `record` writes both down."""

    def __init__(self, caller: HttpExchange, add: Callable[[AuditEntry], None]) -> None:
        self._caller = caller
        self._add = add
        self._at = time.time()
        self._answer: list[bytes] = []
        self._size = 0

    def record(self, prompt: bytes, tenant: str | None, model: str, endpoint: str, outcome: str | None) -> None:
        """Put the request into the log: it is over."""
        self._add(
            AuditEntry(
                id=self._caller.id,
                at=self._at,
                tenant=tenant,
                key=self._caller.name,
                model=model,
                endpoint=endpoint,
                outcome=outcome,
                status=self._caller.status,
                prompt=prompt,
                answer=b"".join(self._answer)[:ANSWER_MAX],
                cut=self._size > ANSWER_MAX,
            )
        )

    async def whole(self, answer: WholeAnswer) -> WholeAnswer:
        self.piece(answer.body)
        return answer

    def piece(self, data: bytes) -> bytes:
        if self._size < ANSWER_MAX:
            self._answer.append(data)
        self._size += len(data)
        return data
