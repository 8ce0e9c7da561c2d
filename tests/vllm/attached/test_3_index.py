"""Is what the router believes of each cache what the engine holds, after thousands of requests with eviction?"""

import random

from penstock.kernel.hashing import block_hashes
from tests.live.cluster import Served
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.attached.heard import all_heard
from tests.vllm.load import Prompts, drive
from tests.vllm.observer import Observer
from tests.vllm.server import BLOCK, BLOCKS, VllmServer
from tests.vllm.truth import Truth
from tests.vllm.waiting import eventually

REQUESTS = 2_600
PROBES = 60
AT_ONCE = 24

Servers = tuple[VllmServer, VllmServer]


async def test_the_index_is_what_the_engines_hold(
    servers: Servers, front: Served, observer: Observer, truths: dict[str, Truth]
) -> None:
    prompts = Prompts(seed=5)
    async with asking() as http:
        answers = await drive(http, front.url, prompts.requests(REQUESTS), concurrency=AT_ONCE)
        assert [a for a in answers if a.status != 200 or a.error] == []
        assert len(answers) == REQUESTS

        for server in servers:
            server.settled()
        for worker, truth in truths.items():
            await eventually(lambda w=worker, t=truth: observer.sequence(w) == t.catch_up().next)
            assert observer.state(worker) == "exact"
            assert observer.held(worker) == truth.held, f"{worker} by its index, and by a replay from the beginning"
            assert BLOCKS // 2 < len(truth.held) < BLOCKS
            assert truth.events["BlockRemoved"] > 10 * BLOCKS, "the load must have evicted all of the cache, often"
        assert observer.index(lambda index: index.counters.copies_removed, 0) > 0, "the load must have made copies"
        assert observer.index(lambda index: index.counters.audit_disagreements, -1) == 0
        refused = observer.index(lambda index: index.counters.parents_unknown + index.counters.malformed, -1)
        assert refused == 0

        # The frontend's own index, by what it expects of requests, one at a time.
        rng = random.Random(8)
        kinds = {"full": 0, "part": 0, "none": 0}
        for _ in range(PROBES):
            await all_heard(front, truths)
            prompt = prompts.said() if rng.random() < 0.8 else prompts.next()
            if rng.random() < 0.5:
                prompt = prompt[: max(BLOCK, len(prompt) - len(prompt) % BLOCK)]
            blocks = list(block_hashes(prompt, BLOCK))
            pin = {"x-penstock-worker": rng.choice(WORKERS)} if rng.random() < 0.5 else None
            answer = await ask(http, front.url, completion(prompt, 1), headers=pin)
            depth = truths[answer.worker].depth(blocks)
            # The last token is always computed, so of a prompt that is held in full and ends with a block, that
            # block is computed as well: one less is reported.
            reachable = (len(prompt) - 1) // BLOCK
            assert answer.expected == min(depth, reachable) * BLOCK, "what the events say"
            assert answer.cached == answer.expected, "what the engine says"
            kinds["full" if depth > reachable else "part" if depth else "none"] += 1
        assert min(kinds.values()) > 0, f"the probes must be of every kind: {kinds}"


async def test_requests_that_ran_at_once_were_expected_nearly_right(servers: Servers, front: Served) -> None:
    """Under load a decision is older than the engine's by what happens in between; it must not be far off."""
    async with asking() as http:
        answers = await drive(http, front.url, Prompts(seed=6, families=12).requests(200), concurrency=6)
    wrong = sum(abs(answer.expected - answer.cached) for answer in answers)
    assert wrong < 0.1 * sum(answer.prompt_tokens for answer in answers)
    assert sum(answer.cached for answer in answers) > 0
