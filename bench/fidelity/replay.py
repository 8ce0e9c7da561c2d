"""What would the simulated engine have done with these arrivals? One engine on virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from errors import Served

from penstock.kernel.machine import SECOND
from penstock.kernel.simulation import Simulation
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.settings import SimSettings


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that no other shares a prefix with: seconds since the start, and tokens."""

    at: float
    isl: int
    osl: int


def replay(arrivals: Sequence[Arrival], settings: SimSettings, table: Mapping[str, Any] | None) -> list[Served]:
    """Return what becomes of the requests, in their order.

    Args:
        table: what `penstock_lab.config.timing_files.load_timing` says of the settings' timing.
    Raises:
        RuntimeError: the engine refused one of them, so that the rest is another run than the real one.
    """
    done: dict[str, EngineFinished] = {}

    def world(now: int, sender: str, effect: object) -> tuple[()]:
        if isinstance(effect, EngineFinished):
            done[effect.id] = effect
        return ()

    simulation = Simulation({"engine": Engine(settings, table=table)}, world)
    for number, row in enumerate(arrivals):
        # Blocks have names, of the answer too: a request that is preempted finds its own again, as in a real engine.
        prompt = [number, *range(1, row.isl)]
        submit = SubmitRequest(id=str(number), tokens=prompt, max_tokens=row.osl, ignore_eos=True)
        simulation.post(round(row.at * SECOND), "engine", submit)
    simulation.run()
    if len(done) != len(arrivals):
        raise RuntimeError(
            f"the engine finished {len(done)} of {len(arrivals)} requests: see max_model_len and kv_blocks"
        )
    return [served(done[str(number)]) for number in range(len(arrivals))]


def served(end: EngineFinished) -> Served:
    if end.first is None:
        raise RuntimeError(f"request {end.id} ended without a token")
    return Served(end.arrived / SECOND, end.first / SECOND, end.at / SECOND, end.tokens)
