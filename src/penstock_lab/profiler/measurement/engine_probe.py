"""Engine probe: the protocol by which a sweep measures one engine, once per call, and the probe over HTTP.

Over HTTP it measures prefill, decode and mixed passes with streamed completions. Prompts are token ids, none of which
was sent before, so that no cache knows them. Before decode is measured its prompts are sent once, so that their KV is
there and prefill is skipped; ITL counts only while all sequences decode.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import aiohttp
import msgspec

from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.dialects.kv_transfer_protocol import HANDOVERS
from penstock.adapters.engines.stats.step_stats_source import steps_of
from penstock.config.files.profile_manifest import PointKind
from penstock.kernel.errors import EngineError
from penstock.kernel.values import EngineLimits, JsonObject, WorkerCard
from penstock.router.events import Handoff
from penstock_lab.report.bench.load_generator import LoadGenerator, PlannedShot, ShotSample
from penstock_lab.traffic.prompt_maker import TOKENS


class PointKey(msgspec.Struct, frozen=True, order=True):
    """What is to be measured, in the terms of `penstock.config.files.profile_manifest.ProfilePoint`; ``context`` as
    it is asked for: the tokens of a sequence's prompt."""

    kind: PointKind
    tp: int
    tokens: int = 0
    seqs: int = 0
    context: int = 0

    def __str__(self) -> str:
        parts = [f"{self.tokens:,} tokens"] if self.tokens else []
        parts += [f"{self.seqs} in flight of {self.context:,} tokens"] if self.seqs else []
        return f"{self.kind.replace('_', ' ')}, TP {self.tp}" + (f": {' beside '.join(parts)}" if parts else "")


class ProbeSample(NamedTuple):
    """One measurement in seconds. ``inside``, ``tpot``, ``context``: as the point has them; None is unknown."""

    seconds: float
    inside: float | None = None
    tpot: float | None = None
    context: float | None = None


class EngineProbe(Protocol):
    """One engine that serves nothing else meanwhile."""

    @property
    def limits(self) -> EngineLimits[int | None]: ...

    async def measure(self, key: PointKey) -> ProbeSample:
        """Measure one point once: prefill with a cold cache, decode and mixed over warmed prefixes.

        Raises:
            EngineError: the engine failed, refused, or gave no moment in which all sequences decoded.
        """
        ...


PATH = "/v1/completions"
STEPS = 48
"""Output tokens of a decode measurement: the first of some streams come before the last of others'."""
TIMEOUT = 600.0
"""Seconds for one request; a prompt of 100,000 tokens on a slow engine takes minutes."""
INFLIGHT_MAX = 4096
WARM = 0.5
"""Share of a prompt that must come from cache for its prefill to count as skipped."""
SETTLE = 0.05
"""Seconds until an engine's report of its last pass has arrived."""


class HttpProbe:
    """Measures one engine by URL.

    Args:
        partner: an engine that it can take KV from; without one no transfer is measured.
    """

    def __init__(self, http: aiohttp.ClientSession, card: WorkerCard, partner: WorkerCard | None = None) -> None:
        self.card = card
        self._http = http
        self._partner = partner
        self._random = random.Random()
        self._steps = steps_of(card, http, "profile")
        self._prompts: list[list[int]] = []
        self._warm: PointKey | None = None

    @property
    def limits(self) -> EngineLimits[int | None]:
        return self.card.limits

    def close(self) -> None:
        self._steps.close()

    async def measure(self, key: PointKey) -> ProbeSample:
        if key.kind == "prefill":
            return await self._prefill(key.tokens)
        if key.kind == "transfer":
            return await self._transfer(key.tokens)
        return await self._decode(key) if key.kind == "decode" else await self._mixed(key)

    async def _prefill(self, tokens: int) -> ProbeSample:
        await self._inside()
        (sample,) = await self._send([self._shot(0, self._prompt(tokens), 1)])
        if sample.cached is not None and sample.cached > tokens * (1.0 - WARM):
            raise EngineError(f"{self.card.url} had {sample.cached} of {tokens} new tokens in its cache")
        inside = await self._inside()
        return ProbeSample(_first_token_seconds(sample), None if inside is None else inside[0])

    async def _decode(self, key: PointKey) -> ProbeSample:
        await self._warmed(key)
        await self._inside()
        samples = await self._send([self._shot(n, prompt, STEPS) for n, prompt in enumerate(self._prompts)])
        if self._cold(samples):
            self._warm = None  # evicted since the last time
            await self._warmed(key)
            samples = await self._send([self._shot(n, prompt, STEPS) for n, prompt in enumerate(self._prompts)])
            if self._cold(samples):
                raise EngineError(
                    f"{self.card.url} keeps no prefixes of {key}", hint="start it with prefix caching, and no others"
                )
        inside = await self._inside() if key.seqs == 1 else None
        window = window_of(samples)
        spans = [span_of(sample, *window) for sample in samples]
        each = [(s.chunks[-1][0] - s.chunks[0][0]) / (s.tokens - s.chunks[0][1]) for s in samples]
        return ProbeSample(
            sum(seconds for seconds, _, _ in spans) / sum(tokens for _, tokens, _ in spans),
            None if inside is None or not inside[1] else inside[0] / inside[1],
            sum(each) / len(each),
            key.context + sum(before + tokens / 2 for _, tokens, before in spans) / len(spans),
        )

    async def _mixed(self, key: PointKey) -> ProbeSample:
        """Send a prompt while sequences decode: the gap in their streams is its pass."""
        await self._warmed(key)
        alone = await self._decode(key)
        shots = [self._shot(n, prompt, STEPS) for n, prompt in enumerate(self._prompts)]
        due = STEPS / 3 * alone.seconds
        shots.append(self._shot(len(shots), self._prompt(key.tokens), 1, due))
        *beside, lone = await self._send(shots)
        answered = lone.sent + _first_token_seconds(lone)
        gaps = [gap for sample in beside if (gap := gap_of(sample, lone.sent, answered, alone.seconds)) is not None]
        if 2 * len(gaps) < len(beside):
            raise EngineError(f"the streams of {key} ended before the prompt's pass")
        return ProbeSample(sorted(gaps)[len(gaps) // 2], context=alone.context)

    async def _transfer(self, tokens: int) -> ProbeSample:
        """Let the partner make a prompt's KV, take it, and compare with the same prompt from the own cache."""
        source = self._partner
        protocol = self.card.handoff or "completed"
        way = HANDOVERS.get((protocol, self.card.engine))
        if source is None or way is None or protocol != "completed":
            raise EngineError(f"no transfer into {self.card.url} can be measured by hand-off {protocol}")
        prompt, handoff = self._prompt(tokens), Handoff(protocol=protocol, key=self._random.getrandbits(62))
        body = way.prefill(self._body(prompt, 1), handoff, source)
        async with self._http.post(source.url + PATH, json=body, headers=self._headers()) as answer:
            text = await answer.read()
            if answer.status != 200:
                raise EngineError(f"{source.url} answered {answer.status}: {text[:200].decode('utf-8', 'replace')}")
        made = way.decode_params(msgspec.json.decode(text))
        if made is None:
            raise EngineError(f"{source.url} holds no KV for another engine", hint="start both for a hand-off")
        handoff = msgspec.structs.replace(handoff, source=source)
        (remote,) = await self._send([self._shot(0, prompt, 1, more=way.decode(made, handoff))])
        (local,) = await self._send([self._shot(0, prompt, 1)])
        return ProbeSample(max(0.0, _first_token_seconds(remote) - _first_token_seconds(local)))

    async def _warmed(self, key: PointKey) -> None:
        same = None if self._warm is None else (self._warm.seqs, self._warm.context)
        if same == (key.seqs, key.context):
            return
        self._prompts = [self._prompt(key.context) for _ in range(key.seqs)]
        await self._send([self._shot(n, prompt, 1) for n, prompt in enumerate(self._prompts)])
        self._warm = key

    async def _send(self, shots: Sequence[PlannedShot]) -> list[ShotSample]:
        ended: list[ShotSample] = []
        generator = LoadGenerator(
            self._http, self.card.url, inflight_max=INFLIGHT_MAX, timeout=TIMEOUT, ended=ended.append
        )
        await generator.run(iter(shots))
        for sample in ended:
            if sample.ending != "ok" or not sample.chunks:
                raise EngineError(f"{self.card.url} did not answer: {sample.reason or 'no token'}")
        return sorted(ended, key=lambda sample: sample.key)

    async def _inside(self) -> tuple[float, int] | None:
        """Return seconds and number of passes since the last call, where the engine itself says so."""
        if self.card.stats is not None:
            await asyncio.sleep(SETTLE)
        window = await self._steps.take(busy=True)
        if window is None or window.wall is None or "wall" in window.estimated or not window.passes:
            return None
        return window.wall, window.passes

    def _cold(self, samples: Sequence[ShotSample]) -> bool:
        """Return whether a prompt had to be computed again, although it fills blocks that could have been kept."""
        least = 2 * (self.card.block_size or 0)
        return any(
            sample.cached is not None and (total := sample.prompt_tokens or 0) >= least and sample.cached < WARM * total
            for sample in samples
        )

    def _shot(
        self, key: int, prompt: list[int], tokens: int, due: float = 0.0, more: JsonObject | None = None
    ) -> PlannedShot:
        body = msgspec.json.encode({**self._body(prompt, tokens), **(more or {})})
        return PlannedShot(key=key, due=due, path=PATH, body=body, headers=self._headers())

    def _headers(self) -> dict[str, str]:
        request = f"profile-{self._random.getrandbits(48):x}"
        return {"content-type": "application/json", **dialect_of(self.card.engine).headers(request)}

    def _body(self, prompt: list[int], tokens: int) -> JsonObject:
        return {
            "model": self.card.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(*TOKENS) for _ in range(tokens)]


def window_of(samples: Sequence[ShotSample]) -> tuple[float, float]:
    """Return from when until when all streams decode.

    Raises:
        EngineError: there is no such time.
    """
    begin = max(sample.chunks[0][0] for sample in samples)
    end = min(sample.chunks[-1][0] for sample in samples)
    if not any(span_of(sample, begin, end)[1] for sample in samples):
        most = max(sample.tokens for sample in samples)
        early = [sample.tokens for sample in samples if sample.tokens < most]
        if early:
            raise EngineError(
                f"{len(early)} of {len(samples)} sequences ended early, one after {min(early)} of {most} tokens",
                hint="the engine must keep to ignore_eos, and its context must have room for the output",
            )
        raise EngineError(f"{len(samples)} sequences never decoded at one time", hint="they do not fit the engine")
    return begin, end


def span_of(sample: ShotSample, begin: float, end: float) -> tuple[float, int, int]:
    """Return the seconds between a stream's first and last chunk within a time, its tokens in them, and those before.

    The first chunk ends what came before, so only tokens of later ones count.
    """
    within = [(at, tokens) for at, tokens in sample.chunks if begin <= at <= end]
    if len(within) < 2:
        return 0.0, 0, 0
    before = sum(tokens for at, tokens in sample.chunks if at <= within[0][0])
    return within[-1][0] - within[0][0], sum(tokens for _, tokens in within[1:]), before


def gap_of(sample: ShotSample, sent: float, answered: float, step: float) -> float | None:
    """Return the seconds of the pass that a stream waited for while a prompt was computed.

    Args:
        sent, answered: of the prompt; ``step``: seconds of a pass without it, which the other tokens took.
    """
    before = [at for at, _ in sample.chunks if at <= sent]
    after = [at for at, _ in sample.chunks if at >= answered]
    if not before or not after:
        return None
    tokens = sum(count for at, count in sample.chunks if before[-1] < at <= after[0])
    return after[0] - before[-1] - (tokens - 1) * step


def _first_token_seconds(sample: ShotSample) -> float:
    return sample.chunks[0][0] - sample.sent
