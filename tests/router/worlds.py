"""Situations that router tests start from: cards, arrivals, and a router with workers."""

import random
from typing import TypeVar

from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import SECOND, Effect, Event, Nanos
from penstock.kernel.values import Prompt, RequestId, Slo, WorkerCard, WorkerId
from penstock.router.events import Arrived, Closed, Dispatch, Preferences, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings

E = TypeVar("E", bound=Effect)
MODEL = "m"
BLOCK = 16


def card(name: str, epoch: int = 1, **changes: object) -> WorkerCard:
    fields: dict[str, object] = {
        "id": WorkerId(name),
        "epoch": epoch,
        "model": MODEL,
        "url": f"http://{name}",
        "block_size": BLOCK,
        "kv_blocks": 1000,
        "max_batched_tokens": 1024,
    }
    return WorkerCard(**{**fields, **changes})  # type: ignore[arg-type]


def arrived(name: str, tokens: int | list[int] = 64, **changes: object) -> Arrived:
    prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
    wish = changes.pop("preferences", None) or Preferences()
    estimated = bool(changes.pop("text", False))
    return Arrived(
        id=RequestId(name),
        model=MODEL,
        prompt=Prompt(len(prompt), list(block_hashes(prompt, BLOCK)), estimated),
        preferences=wish,  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )


def prompt(seed: int, tokens: int = 64) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(tokens)]


class World:
    """A router, the effects that it has had, and a clock that tests move."""

    def __init__(self, *workers: WorkerCard, seed: int = 1, slo: Slo = Slo(), **settings: object) -> None:
        self.router = Router(RouterSettings(**settings), slo=slo, seed=seed)  # type: ignore[arg-type]
        self.now: Nanos = 0
        self.effects: list[Effect] = []
        for worker in workers:
            self.post(WorkerJoined(card=worker))

    def post(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += round(after * SECOND)
        effects = self.router.handle(self.now, event)
        self.router.check()
        self.effects.extend(effects)
        return effects

    def sent(self, name: str) -> Dispatch:
        return [e for e in self.effects if isinstance(e, Dispatch) and e.id == name][-1]

    def ended(self, name: str) -> Closed:
        found = [e for e in self.effects if isinstance(e, Closed) and e.id == name]
        assert len(found) == 1, f"{name} has {len(found)} terminal effects"
        return found[0]


def only(effects: list[Effect], kind: type[E]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {effects}"
    return found[0]


def none(effects: list[Effect], kind: type[Effect]) -> bool:
    return not any(isinstance(effect, kind) for effect in effects)
