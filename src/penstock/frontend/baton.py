"""What is handed from one engine to the next in the middle of an answer? What was said, and how it goes on."""

import asyncio
import time

from penstock.adapters.engines.dialect import Dialect
from penstock.frontend.continuation import ContinuationTap, last_words, usage_of_all
from penstock.frontend.job import Job
from penstock.frontend.migration import Impossible, Leg, leg_of, obstacle, transcript_for
from penstock.frontend.prompts import Prompt
from penstock.frontend.service import Resolved, Service
from penstock.frontend.sse import SseTap
from penstock.frontend.transcript import Transcript
from penstock.router.events import Resume


class Baton:
    """The going on of one streamed answer. Before anything was said every attempt begins anew."""

    __slots__ = ("_job", "_lost_at", "_prompt", "_resolved", "_service", "_unfit", "leg", "transcript", "why")

    def __init__(self, service: Service, resolved: Resolved, job: Job, prompt: Prompt) -> None:
        self.leg: Leg | None = None
        """Where the present attempt goes on; None where it begins."""
        self.transcript: Transcript | None = None
        """What was said so far; None where nobody else could go on with it."""
        self.why: str | None = None
        """Why a broken answer can't go on elsewhere, where that is known already."""
        self._unfit: Dialect | None = None
        """Of the engine whose answer nobody could take up."""
        self._service = service
        self._resolved = resolved
        self._job = job
        self._prompt = prompt
        self._lost_at: float | None = None

    @property
    def job(self) -> Job:
        """What is asked at present: what the client asked, or the rest of it."""
        return self._job if self.leg is None else self.leg.job

    def start(self, dialect: Dialect) -> tuple[Job, Transcript | None]:
        """Return what an engine is asked, and what is to follow its answer from the beginning."""
        if self.leg is not None:
            return self.leg.job, None
        if self._service.settings.router.migration.limit == 0:
            self.why = "router.migration.limit is 0"
            return self._job, None
        found = transcript_for(self._job, dialect)
        if found is None:
            self._unfit = dialect
        return self._job, found

    @property
    def why_not(self) -> str:
        """Why a broken answer can't go on elsewhere; worked out only when it is asked for."""
        if self.why is not None or self._unfit is None:
            return self.why or ""
        return obstacle(self._job) or f"{self._unfit.title} can't take up an answer"

    def tap(self, dialect: Dialect) -> SseTap:
        """Return what looks at the stream of a new attempt."""
        parsed = self._job.parsed
        if self.leg is None or self.transcript is None or parsed is None:
            return SseTap(strip_usage=self._job.strip_usage, openai=parsed is not None, gave_up=dialect.gave_up)
        return ContinuationTap(
            self.leg,
            self.transcript,
            chat=self._chat,
            usage=parsed.wants_usage,
            always=bool((parsed.fields.get("stream_options") or {}).get("continuous_usage_stats")),
            ids=bool(parsed.fields.get("return_token_ids")),
            gave_up=dialect.gave_up,
        )

    async def drop(self, counted: int) -> Resume | None:
        """The engine that spoke is lost: say where another could go on, or None where none can.

        Args:
            counted: output tokens as far as they were seen.
        """
        transcript = self.transcript
        if transcript is None:
            return None
        self._lost_at = time.monotonic()
        transcript.settle()
        hints = self._job.hints
        try:
            # Long prompts are some ms of work, and an engine that dies takes many streams with it.
            self.leg = await asyncio.to_thread(
                leg_of,
                transcript,
                self._job,
                self._prompt,
                self._resolved,
                self._service.hashing(self._resolved, None if hints is None else hints.salt),
                self._service.settings.router.migration.tokens_max,
                counted,
            )
        except Impossible as error:
            self.why = str(error)
            return None
        return self.leg.point

    @property
    def complete(self) -> bool:
        """Whether all output had come before the engine was lost, and only the last words are missing."""
        if self.leg is None or self.transcript is None:
            return False
        return self.transcript.finish_reason is not None or (self.leg.left is not None and self.leg.left <= 0)

    def last_words(self) -> tuple[bytes, dict[str, object]]:
        """Return how the stream of a `complete` answer ends, and its usage."""
        parsed = self._job.parsed
        assert parsed is not None and self.leg is not None and self.transcript is not None
        said = last_words(self.leg, self.transcript, chat=self._chat, usage=parsed.wants_usage)
        return said, usage_of_all(self.leg.prompt_tokens, self.leg.point.tokens)

    def taken(self) -> None:
        """The next engine has begun to speak."""
        if self._lost_at is not None:
            self._service.metrics.migrated(self._resolved.model, time.monotonic() - self._lost_at)
            self._lost_at = None

    @property
    def _chat(self) -> bool:
        return self._job.parsed is not None and self._job.parsed.endpoint == "chat_completions"
