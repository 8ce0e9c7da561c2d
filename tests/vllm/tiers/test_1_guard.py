"""vLLM's own tiering serves flipped bytes as right answers: does the guard around the same tier serve none?"""

from pathlib import Path
from typing import Any

from tests.live.cluster import until
from tests.vllm.asking import Answer
from tests.vllm.tiers.tiered import CACHED, PROMPTS, TOKENS, Tiered, flip, native, prompts, tiered
from tests.vllm.truth import replay

BLOCKS = PROMPTS * TOKENS // 32


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def stored(folder: Path, server: Tiered) -> bool:
    return len(list(folder.rglob("*.bin"))) >= BLOCKS - PROMPTS and server.counter("vllm:num_requests_running") == 0


async def test_the_tier_alone_serves_wrong_answers(venv: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Five of five of vLLM 0.32. Once this fails, vLLM checks what it loads, and the guard may go."""
    folder = tmp_path / "blocks"
    tier = {"type": "fs", "root_dir": str(folder)}
    with tiered(venv, checkpoint, tmp_path / "log", native(tier)) as server:
        first = await server.answers(prompts())
        until(lambda: stored(folder, server), 20.0)
        server.forget()
        assert flip(folder) >= BLOCKS - PROMPTS
        again = await server.answers(prompts())
        wrong = [one != other for one, other in zip(texts(first), texts(again), strict=True)]
        assert sum(wrong) == PROMPTS
        assert min(answer.cached for answer in again) >= CACHED


async def test_the_guarded_tier_serves_none(venv: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    guarded = {
        "type": "GuardedTier",
        "module_path": "penstock_kv.inside.vllm_guard",
        "inner": {"type": "fs", "root_dir": str(folder)},
    }
    with tiered(venv, checkpoint, tmp_path / "log", native(guarded, self_describing_kv_events=True)) as server:
        first = await server.answers(prompts())
        until(lambda: server.counter("penstock_guard_stored_blocks_total") >= BLOCKS - PROMPTS, 20.0)
        assert server.counter("penstock_guard_readback_ok") == 1

        server.forget()
        again = await server.answers(prompts())
        assert texts(again) == texts(first)
        assert min(answer.cached for answer in again) >= CACHED
        assert server.counter("penstock_guard_served_blocks_total") >= BLOCKS - PROMPTS

        server.forget()
        flip(folder)
        flipped = await server.answers(prompts())
        assert texts(flipped) == texts(first), "a block that was flipped was served"
        assert max(answer.cached for answer in flipped) == 0
        assert server.counter("penstock_guard_refused_blocks_total") >= BLOCKS - PROMPTS
        removed, added = changes(server)
        assert removed and removed <= added, "blocks that were refused are announced as removed"

        until(lambda: server.counter("penstock_guard_stored_blocks_total") >= 2 * (BLOCKS - PROMPTS), 20.0)
        server.forget()
        healed = await server.answers(prompts())
        assert texts(healed) == texts(first)
        assert min(answer.cached for answer in healed) >= CACHED, "what is computed again is stored again"
    with tiered(venv, checkpoint, tmp_path / "log2", native(guarded)) as server:
        restarted = await server.answers(prompts())
        assert texts(restarted) == texts(first)
        assert min(answer.cached for answer in restarted) >= CACHED, "the index survives a restart"


def changes(server: Tiered) -> tuple[set[Any], set[Any]]:
    """Return the hashes of blocks that the tier announced as removed, and as stored."""
    removed: set[Any] = set()
    added: set[Any] = set()
    for _, (_, events, *_) in replay(server, 0):
        for event in events:
            if event.get("medium") == "STORAGE":
                (removed if event["type"] == "BlockRemoved" else added).update(event["block_hashes"])
    return removed, added
