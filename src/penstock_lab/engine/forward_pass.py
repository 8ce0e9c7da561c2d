"""`ForwardPass`: the pass or the decode steps that the engine is busy with, and how much is over at a given time."""

from penstock.kernel.machine import Nanos
from penstock_lab.engine.engine_request import EngineRequest
from penstock_lab.engine.timing.decode_steps import DecodeSteps


class ForwardPass:
    """What the engine is busy with: one pass, or ``steps`` equal decode steps.

    ``first``: the group's step counter at its start; ``done``: steps accounted for (over at ``reached``); ``taken``:
    steps whose blocks are taken; ``last``: (sequences, KV tokens) of the last step where the group can't tell now;
    ``look``: steps after which the engine is to look at it, at ``wake``: all of them, or those before one that evicts
    blocks where somebody is to hear of it.
    """

    def __init__(
        self,
        start: Nanos,
        end: Nanos,
        steps: int,
        first: int,
        seqs: int,
        prefills: list[tuple[EngineRequest, int]],
        prefilled: int,
        tokens: int,
        run: DecodeSteps | None,
        taken: int,
        last: tuple[int, int] | None,
    ) -> None:
        # Written out: what `dataclass` makes stays Python where the rest is compiled, and there are three per request.
        self.start = start
        self.end = end
        self.steps = steps
        self.first = first
        self.seqs = seqs
        self.prefills = prefills
        self.prefilled = prefilled
        self.tokens = tokens
        self.run = run
        self.done = 0
        self.taken = taken
        self.last = last
        self.look, self.wake = steps, end
        self.reached = start

    def after(self, steps: int) -> Nanos:
        """Return when so many of its steps are over."""
        if steps == self.steps:
            return self.end
        if steps == self.look:
            return self.wake
        if steps == self.done:
            return self.reached
        return self.start + (self.run.after(steps) if self.run is not None and steps else 0)

    def within(self, now: Nanos) -> int:
        """Return how many of its steps are over at ``now``."""
        if now >= self.end:
            return self.steps
        if self.run is None or self.steps == 1:
            return 0
        return min(self.steps - 1, self.run.within(now - self.start))
