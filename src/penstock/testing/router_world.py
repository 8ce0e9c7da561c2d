"""`RouterWorld`: a router with workers for tests, with cards, prompts and arrivals to begin from."""

import random

from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import SECOND, Effect, Event, Nanos
from penstock.kernel.values import Prompt, RequestId, Slo, WorkerCard, WorkerId
from penstock.router.events import Arrived, Closed, Dispatch, Preferences, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings

MODEL = "m"
BLOCK = 16


def card(name: str, epoch: int = 1, **changes: object) -> WorkerCard:
    """Return a worker's card; ``changes``: fields of it."""
    fields: dict[str, object] = {
        "id": WorkerId(name),
        "epoch": epoch,
        "model": MODEL,
        "url": f"http://{name}",
        "block_size": BLOCK,
        "kv_blocks": 1000,
        "max_num_batched_tokens": 1024,
    }
    return WorkerCard(**{**fields, **changes})  # type: ignore[arg-type]


def arrived(name: str, tokens: int | list[int] = 64, **changes: object) -> Arrived:
    """Return the arrival of a request; ``tokens``: of its prompt, or how many; ``text``: their number is a guess."""
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
    """Return random token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(tokens)]


class RouterWorld:
    """A router, the effects that it has had, and a clock that tests move.

    Args:
        workers: that have joined.
        settings: of `penstock.router.settings.RouterSettings`.
    """

    def __init__(self, *workers: WorkerCard, seed: int = 1, slo: Slo = Slo(), **settings: object) -> None:
        self.router = Router(RouterSettings(**settings), slo=slo, seed=seed)  # type: ignore[arg-type]
        self.now: Nanos = 0
        self.effects: list[Effect] = []
        for worker in workers:
            self.post(WorkerJoined(card=worker))

    def post(self, event: Event, after: float = 0.0) -> list[Effect]:
        """Give the router an event, ``after`` seconds, check its invariants, and return the effects."""
        self.now += round(after * SECOND)
        effects = self.router.handle(self.now, event)
        self.router.check()
        self.effects.extend(effects)
        return effects

    def sent(self, name: str) -> Dispatch:
        """Return the newest dispatch of a request."""
        return [e for e in self.effects if isinstance(e, Dispatch) and e.id == name][-1]

    def ended(self, name: str) -> Closed:
        """Return the one end of a request."""
        found = [e for e in self.effects if isinstance(e, Closed) and e.id == name]
        assert len(found) == 1, f"{name} has {len(found)} terminal effects"
        return found[0]
