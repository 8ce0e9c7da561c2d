"""Does each odd way of an engine with its KV events, seen or read of, come out right?"""

import asyncio
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, encode_batch
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.listen_address import free_port
from penstock.adapters.seams import KvBatch
from penstock.adapters.zmq_receive import shared_context
from penstock.kernel.errors import EngineError
from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import KvCleared, KvEvent, KvRemoved, KvStored, Target, WorkerId
from penstock.router.events import KvObserved
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.kv_index.kv_event_stream import KvEventStream
from tests.kv_batches import batches_of

PATIENCE = 30.0
SESSION = Path(__file__).parent / "data" / "vllm-0.32-session.jsonl"
W = Target(WorkerId("w"))
BLOCK = 2
A, B, C = [1, 2], [3, 4], [5, 6]


class View:
    """What the router makes of one engine's batches: stream, then index."""

    def __init__(self) -> None:
        self.index = ExactIndex(BLOCK)
        self.index.join(W, native=False, copies=True)  # as for vLLM
        self.stream = KvEventStream()
        self.number = 0

    def hear(self, *events: KvEvent) -> None:
        batch = KvObserved(worker=W.worker, rank=0, epoch=1, sequence=self.number, events=list(events))
        self.number += 1
        outcome = self.stream.observe(batch)
        assert not outcome.clear and outcome.replay_from is None
        for event in outcome.events:
            self.index.apply(W, event)
        self.index.check()

    def holds(self, *blocks: list[int]) -> int:
        """Leading blocks of a prompt that the engine holds, as we see it."""
        found = self.index.overlap(block_hashes([token for block in blocks for token in block], BLOCK))
        return found[W].device if W in found else 0


def stored(name: int, tokens: list[int], parent: int | None = None) -> KvStored:
    return KvStored(hashes=[name], parent=parent, tokens=tokens, block_size=BLOCK)


def test_a_clear_that_comes_with_the_next_step_takes_only_what_was_before_it() -> None:
    view = View()
    view.hear(stored(11, A), stored(12, B, 11))
    assert view.holds(A, B) == 2
    # Nothing is announced while the engine idles; then the clear and the next request's blocks come together.
    view.hear(KvCleared(), stored(11, A), stored(13, C, 11))
    assert view.holds(A, B) == 1 and view.holds(A, C) == 2


def test_a_block_that_is_computed_twice_is_gone_only_when_both_copies_are() -> None:
    view = View()
    view.hear(stored(11, A), stored(12, B, 11))
    view.hear(stored(12, B, 11))  # another request computed it at the same time
    view.hear(KvRemoved(hashes=[12]))
    assert view.holds(A, B) == 2
    view.hear(KvRemoved(hashes=[12]))
    assert view.holds(A, B) == 1


def test_blocks_are_removed_one_by_one_from_the_end() -> None:
    view = View()
    view.hear(stored(11, A), stored(12, B, 11), stored(13, C, 12))
    view.hear(KvRemoved(hashes=[13]), KvRemoved(hashes=[12]), KvRemoved(hashes=[11]))
    assert view.holds(A, B, C) == 0 and len(view.index) == 0


def test_a_signed_and_an_unsigned_spelling_are_one_block() -> None:
    decoder = KvDecoder()
    view = View()
    name = (1 << 64) - 5
    plain = {"type": "BlockStored", "parent_block_hash": None, "token_ids": A, "block_size": BLOCK}
    for spelling in (name, name - (1 << 64)):
        payload = msgspec.msgpack.encode([1.0, [{**plain, "block_hashes": [spelling]}], 0])
        view.hear(*decoder.decode(payload).events)
    assert view.holds(A) == 1
    removal = {"type": "BlockRemoved", "block_hashes": [name - (1 << 64)]}
    payload = msgspec.msgpack.encode([1.0, [removal, removal], 0])
    view.hear(*decoder.decode(payload).events)  # each copy was announced, and each goes
    assert view.holds(A) == 0


async def test_a_publisher_that_connects_is_heard_where_we_bind() -> None:
    with shared_context().socket(zmq.PUB) as publisher:
        publisher.linger = 0
        port = free_port()
        publisher.connect(f"tcp://127.0.0.1:{port}")  # as vLLM does where its endpoint has no star
        subscriber = KvSubscriber(f"@tcp://127.0.0.1:{port}", topic="kv")
        batches = batches_of(subscriber)
        waiting = asyncio.ensure_future(anext(batches))
        async with asyncio.timeout(PATIENCE):
            while not waiting.done():
                publisher.send_multipart((b"kv", bytes(8), encode_batch(1.0, [KvCleared()])))
                await asyncio.wait({waiting}, timeout=0.02)
        assert waiting.result() == KvBatch(0, 0, [KvCleared()])
        subscriber.close()


async def test_an_address_that_can_not_be_bound_is_told_with_the_way_out() -> None:
    with shared_context().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        subscriber = KvSubscriber(f"@tcp://127.0.0.1:{port}")
        with pytest.raises(EngineError, match="can't be bound for KV events"):
            await anext(batches_of(subscriber))


def test_a_recorded_session_with_vllm_is_predicted_probe_by_probe() -> None:
    """Shared prefixes, tenants, equal prompts at one time, full hits, evictions and a clear, as a real server told."""
    lines = [json.loads(line) for line in SESSION.read_text().splitlines()]
    size = lines[0]["block_size"]
    index, decoder = ExactIndex(size), KvDecoder()
    index.join(W, native=False, alike="vllm sha256", copies=True)
    happened: Counter[str] = Counter()
    for line in lines[1:]:
        if "frame" in line:
            for event in decoder.decode(bytes.fromhex(line["frame"])).events:
                happened[type(event).__name__] += 1
                index.apply(W, event)
            continue
        prompt = [int(token) for token in line["prompt"].split()]
        found = index.overlap(block_hashes(prompt, size, salt=line["salt"]))
        predicted = found[W].device * size if W in found else 0
        if predicted == len(prompt):
            predicted -= size  # the last block of a prompt that is held in full is computed once more
            happened["full hits"] += 1
        assert predicted == line["cached"], prompt
        happened["probes"] += 1
    index.check()
    assert happened["probes"] == 48 and happened["full hits"] > 5
    assert happened["KvRemoved"] > 10 and happened["KvCleared"] == 1
