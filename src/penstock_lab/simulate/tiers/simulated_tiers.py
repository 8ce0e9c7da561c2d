"""Simulated tiers: the tier machine of one simulated engine, with link models in place of what carries bytes.

`penstock_kv.blocks.tiers` decides as it does live: what is offloaded, evicted, loaded, and where loading is worth it.
`TierCarriers` says how long a move takes; it always succeeds, unless a peer has dropped the block meanwhile.
"""

import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Wake, Woken, seconds
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import KvEvent, KvRemoved, KvStored, Tier
from penstock_kv.blocks.block_key import OF_ENGINE_HASH, PREFIX, VERSION, BlockKey
from penstock_kv.blocks.tiers.tier_events import (
    AskPeer,
    BlockHints,
    BlocksAnswered,
    BlocksAsked,
    BlocksOffered,
    BlocksRemoved,
    BlocksStored,
    BlocksUsed,
    BlocksWanted,
    EdgeMeasured,
    EngineSpeed,
    JobCancelled,
    JobEnded,
    Move,
    MoveEnded,
    PeerAnswered,
    PeersChanged,
    Place,
    PrefetchWanted,
)
from penstock_kv.blocks.tiers.tier_machine import TierMachine
from penstock_kv.blocks.tiers.tier_settings import TierSettings
from penstock_lab.engine.events import SubmitRequest
from penstock_lab.engine.external_kv.kv_tiers import LoadedBlocks
from penstock_lab.engine.settings import TierLinks
from penstock_lab.simulate.tiers.tier_carriers import TierCarriers

ANNOUNCED: dict[str, Tier] = {"host": "host", "disk": "disk"}
"""Tiers that routers know; what lies in an object store is as near to one worker as to another."""
EXPECTED_MAX = 1024
"""Sessions whose next request is waited for; those beyond are not brought up."""
MEASURED = 10
"""Moves of each size by which the machine knows an edge beforehand, as after a read-back at the start."""
_HEAD = bytes((OF_ENGINE_HASH, VERSION)) + bytes(PREFIX - 2)
_NO_HINTS = BlockHints()


class SimulatedTiers:
    """Tiers below one engine: a `penstock_lab.engine.external_kv.kv_tiers.KvTiers`.

    Args:
        settings: of the machine.
        links: between the tiers.
        gpus: of the engine.
        seconds_per_token: that the engine takes to compute a prompt.
        name: of the engine, among its peers.
        peers: engines that may fetch from each other; None where this one may not.
    """

    def __init__(
        self,
        settings: TierSettings,
        links: TierLinks,
        *,
        gpus: int = 1,
        seconds_per_token: float,
        name: str = "",
        peers: "dict[str, SimulatedTiers] | None" = None,
    ) -> None:
        self.settings = settings
        self.machine = TierMachine(settings)
        self.carriers = TierCarriers(links, settings.block_bytes, gpus)
        self.places: dict[str, set[BlockKey]] = {}
        """tier -> keys of the blocks that it has"""
        self._name = name
        self._peers = peers
        self._known: list[str] = []
        self._now: Nanos = 0
        self._wake: Nanos | None = None
        self._serial = 0
        self._moves: list[tuple[Nanos, int, Nanos, Move]] = []
        """A heap of (end, serial, beginning, move)."""
        self._expected: list[tuple[Nanos, int, list[BlockKey]]] = []
        """A heap of (when to bring blocks up, serial, keys)."""
        self._jobs: dict[int, tuple[str, dict[str, int]]] = {}
        """Open loads: job -> (request, tier -> blocks that come from it)"""
        self._answered = 0
        """Blocks of the last answer: a number, since mypyc keeps to what mypy narrows an optional one to."""
        self._over: list[LoadedBlocks] = []
        self._changes: list[KvEvent] = []
        if peers is not None:
            peers[name] = self
        self._post(0, EngineSpeed(seconds_per_token=seconds_per_token))
        for source, target in self.carriers.edges:
            self._measure(0, source, target)

    # --- what the engine's scheduler asks ---------------------------------------------------------------------------

    @property
    def due(self) -> Nanos | None:
        """When a move or a deadline is over next."""
        at = self._moves[0][0] if self._moves else None
        if self._expected and (at is None or self._expected[0][0] < at):
            at = self._expected[0][0]
        if self._over:
            return self._now
        if self._wake is None:
            return at
        return self._wake if at is None or self._wake < at else at

    def lookup(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> int:
        """Return how many blocks of ``chain[start:end]`` can be loaded at less cost than computing them."""
        if self._peers is not None:
            self._meet(now, self._peers)
        self._serial += 1
        self._answered = 0
        before = start * self.settings.block_tokens
        keys = keys_of(chain[start:end])
        self._post(now, BlocksAsked(query=self._serial, keys=keys, tokens_before=before, hints=_hints_of(submit)))
        return self._answered

    def load(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> None:
        """Bring these blocks; `advance` says when they are there."""
        self._serial += 1
        keys = keys_of(chain[start:end])
        origins = [self._origin(key) for key in keys]
        self._jobs[self._serial] = (submit.id, {tier: origins.count(tier) for tier in dict.fromkeys(origins)})
        rows = list(range(len(keys)))
        self._post(now, BlocksWanted(job=self._serial, keys=keys, rows=rows, hints=_hints_of(submit)))

    def cancel(self, id: str, now: Nanos) -> None:
        """Nobody waits for what a request loads."""
        for job in [job for job, open in self._jobs.items() if open[0] == id]:
            del self._jobs[job]
            self._post(now, JobCancelled(job=job))

    def store(self, submit: SubmitRequest, chain: Sequence[int], start: int, end: int, now: Nanos) -> None:
        """Offer blocks that the engine has computed."""
        self._serial += 1
        keys = keys_of(chain[start:end])
        parent = keys_of(chain[start - 1 : start])[0] if start else None
        rows = list(range(len(keys)))
        self._post(now, BlocksOffered(job=self._serial, keys=keys, rows=rows, parent=parent, hints=_hints_of(submit)))

    def use(self, chain: Sequence[int], end: int, now: Nanos) -> None:
        """The engine found ``chain[:end]`` in its own cache."""
        self._post(now, BlocksUsed(keys=keys_of(chain[:end])))

    def expect(self, chain: Sequence[int], end: int, at: Nanos) -> None:
        """Bring ``chain[:end]`` up at that time."""
        if len(self._expected) < EXPECTED_MAX:
            self._serial += 1
            heapq.heappush(self._expected, (at, self._serial, keys_of(chain[:end])))

    def advance(self, now: Nanos) -> list[LoadedBlocks]:
        """Let happen what is due by now; return the loads that are over."""
        while True:
            wake = self._wake
            if self._moves and self._moves[0][0] <= now and (wake is None or self._moves[0][0] <= wake):
                at, _, began, move = heapq.heappop(self._moves)
                done = [True] * len(move.keys)
                if move.source == "peer":
                    peer = (self._peers or {}).get(move.peer)
                    there = set() if peer is None else peer.places.get("host", set())
                    done = [key in there for key in move.keys]
                self._post(at, MoveEnded(id=move.id, done=done, seconds=seconds(at - began)))
            elif self._expected and self._expected[0][0] <= now and (wake is None or self._expected[0][0] <= wake):
                at, _, keys = heapq.heappop(self._expected)
                self._post(at, PrefetchWanted(keys=keys))
            elif wake is not None and wake <= now:
                self._wake = None
                self._post(wake, Woken())
            else:
                break
        over, self._over = self._over, []
        return over

    def take_changes(self) -> list[KvEvent]:
        """Return what tiers have gained and lost since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Return tier -> (blocks that it has, blocks that it can have)."""
        settings = self.settings
        rooms = {"host": settings.host_blocks, "disk": settings.disk_blocks, "object": settings.object_blocks}
        return {tier: (len(self.places.get(tier, ())), room) for tier, room in rooms.items() if room}

    def prefetched(self) -> dict[str, int]:
        """Return how many blocks were brought up before anybody asked for them, and how many of these were used."""
        counts = self.machine.state.counts
        return {"brought": counts.prefetched, "used": counts.prefetch_hits, "wasted": counts.prefetch_wasted}

    def costs(self, now: Nanos) -> LoadCosts:
        """Return what loading blocks costs at a moment, and computing them."""
        return self.machine.costs(now)

    # --- the machine -------------------------------------------------------------------------------------------------

    def _post(self, now: Nanos, event: Event) -> None:
        """Give the machine an event, and carry out its effects."""
        now = self._now = max(now, self._now)
        events: deque[Event] = deque((event,))
        while events:
            for effect in self.machine.handle(now, events.popleft()):
                answer = self._carry(now, effect)
                if answer is not None:
                    events.append(answer)

    def _carry(self, now: Nanos, effect: Effect) -> Event | None:
        if isinstance(effect, Move):
            sender = None if self._peers is None else self._peers.get(effect.peer)
            began, ends = self.carriers.carry(now, effect, None if sender is None else sender.carriers)
            self._serial += 1
            heapq.heappush(self._moves, (ends, self._serial, began, effect))
        elif isinstance(effect, BlocksStored):
            self.places.setdefault(effect.tier, set()).update(effect.keys)
            if effect.tier in ANNOUNCED:
                self._changes.append(
                    KvStored(
                        hashes=names_of(effect.keys),
                        parent=None if effect.parent is None else names_of([effect.parent])[0],
                        block_size=self.settings.block_tokens,
                        tier=ANNOUNCED[effect.tier],
                    )
                )
        elif isinstance(effect, BlocksRemoved):
            self.places[effect.tier].difference_update(effect.keys)
            if effect.tier in ANNOUNCED:
                self._changes.append(KvRemoved(hashes=names_of(effect.keys), tier=ANNOUNCED[effect.tier]))
        elif isinstance(effect, JobEnded):
            self._ended(effect)
        elif isinstance(effect, BlocksAnswered):
            self._answered = effect.blocks
        elif isinstance(effect, AskPeer):
            peer = (self._peers or {}).get(effect.peer)
            return PeerAnswered(id=effect.id, blocks=0 if peer is None else peer.leading(effect.keys))
        elif isinstance(effect, Wake):
            self._wake = effect.at
        return None  # nobody's move is cancelled on the way, and nothing here survives a restart

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading blocks that the host tier has."""
        host = self.places.get("host", set())
        for depth, key in enumerate(keys):
            if key not in host:
                return depth
        return len(keys)

    def _ended(self, effect: JobEnded) -> None:
        job = self._jobs.pop(effect.job, None)
        if job is None:
            return  # a store, or a load that nobody waits for
        id, origins = job
        done = effect.done
        blocks = next((place for place, there in enumerate(done) if not there), len(done))
        sources: dict[str, int] = {}
        left = blocks
        for tier, count in origins.items():
            taken = min(left, count)
            if taken:
                sources[tier] = taken
            left -= taken
        self._over.append(LoadedBlocks(id, blocks, sources))

    def _origin(self, key: BlockKey) -> str:
        for tier in ("host", "disk", "object"):
            if key in self.places.get(tier, ()):
                return tier
        return "peer"

    def _meet(self, now: Nanos, peers: "dict[str, SimulatedTiers]") -> None:
        """Know the peers that there are now."""
        names = [name for name in peers if name != self._name]
        if names != self._known:
            fresh = [name for name in names if name not in self._known]
            self._known = names
            self._post(now, PeersChanged(peers=names))
            for name in fresh:
                self._measure(now, "peer", "host", name)

    def _measure(self, now: Nanos, source: Place, target: Place, peer: str = "") -> None:
        """Let the machine know a link before it uses it."""
        for blocks in (1, self.settings.move_blocks) * MEASURED:
            took, size = self.carriers.seconds(source, target, blocks), blocks * self.settings.block_bytes
            self._post(now, EdgeMeasured(source=source, target=target, size=size, seconds=took, peer=peer))

    # --- state -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the state as plain data; a group of peers can't be restored one by one."""
        return {
            "machine": self.machine.snapshot(),
            "carriers": self.carriers.snapshot(),
            "places": {tier: sorted(keys) for tier, keys in self.places.items()},
            "now": self._now,
            "wake": self._wake,
            "serial": self._serial,
            "moves": [
                [ends, serial, began, msgspec.to_builtins(move, builtin_types=(bytes,))]
                for ends, serial, began, move in self._moves
            ],
            "jobs": [[job, id, dict(origins)] for job, (id, origins) in self._jobs.items()],
            "expected": [[at, serial, list(keys)] for at, serial, keys in self._expected],
            "over": [[id, blocks, dict(sources)] for id, blocks, sources in self._over],
            "changes": msgspec.to_builtins(self._changes),
        }

    def restore(self, state: Snapshot) -> None:
        """Become what `snapshot` wrote."""
        self.machine.restore(state["machine"])
        self.carriers.restore(state["carriers"])
        self.places = {tier: set(keys) for tier, keys in state["places"].items()}
        self._now, self._wake, self._serial = state["now"], state["wake"], state["serial"]
        self._moves = [
            (ends, serial, began, msgspec.convert(move, Move, builtin_types=(bytes,)))
            for ends, serial, began, move in state["moves"]
        ]
        self._jobs = {job: (id, origins) for job, id, origins in state["jobs"]}
        self._expected = [(at, serial, list(keys)) for at, serial, keys in state["expected"]]
        self._over = [LoadedBlocks(id, blocks, sources) for id, blocks, sources in state["over"]]
        self._changes = [msgspec.convert(change, KvEvent) for change in state["changes"]]

    def check(self) -> None:
        """Raise `InvariantError` where the machine's tiers and what they announced disagree."""
        self.machine.check()
        for tier, (blocks, room) in self.blocks().items():
            if blocks > room:
                raise InvariantError(f"tier {tier} announced {blocks} blocks and has room for {room}")


def keys_of(names: Sequence[int]) -> list[BlockKey]:
    """Return keys for names of blocks: there are no bytes that a cryptographic name would have to protect."""
    return [BlockKey(_HEAD + name.to_bytes(16, "big")) for name in names]


def names_of(keys: Sequence[BlockKey]) -> list[int]:
    """Return the names for which `keys_of` made these keys."""
    return [int.from_bytes(key[PREFIX:], "big") for key in keys]


def _hints_of(submit: SubmitRequest) -> BlockHints:
    if not submit.pin and not submit.keep:
        return _NO_HINTS
    return BlockHints(priority=submit.keep, pin=submit.pin)
