"""Engine probe: the protocol by which a sweep measures one engine, once per call."""

from typing import NamedTuple, Protocol

import msgspec

from penstock.config.files.profile_manifest import PointKind
from penstock.kernel.values import EngineLimits


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
