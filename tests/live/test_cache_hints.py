"""Hints for KV tiers through a whole cluster: a pinned prompt outlives pressure on the tiers."""

from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served

BLOCKS = 48
"""Of the engine, and again of its host tier: fifteen prompts of 12 blocks are too many for both."""
BLOCK_BYTES = 16 * 131072
CONFIG = f"""
models:
  sim:
    tokenizer: builtin:sim
    pools:
      main:
        replicas: 1
        cache: {{host: {BLOCKS * BLOCK_BYTES}, order: ORDER}}
        sim: {{kv_blocks: {BLOCKS}, timing: {{prefill: [0, 1, 1], decode: [0, 0, 1]}}}}
"""


def ask(cluster: Served, number: int, **fields: Any) -> tuple[int, dict[str, str]]:
    """Return the cached tokens of a prompt, and the answer's headers."""
    status, body, headers = cluster.chat(f"document {number}: " + f"word{number} " * 60, max_tokens=1, **fields)
    assert status == 200, body
    return (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0, headers


@pytest.mark.parametrize("order", ["priority", pytest.param("lru", marks=pytest.mark.slow)])
def test_a_pin_keeps_a_prompt_in_the_tiers_or_is_reported(tmp_path: Path, order: str) -> None:
    config = tmp_path / "tiers.yaml"
    config.write_text(CONFIG.replace("ORDER", order))
    with served(tmp_path, "up", str(config), "--frontend.port", str(free_port())) as cluster:
        pin = {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}}
        _, headers = ask(cluster, 0, **pin)
        assert headers.get("x-penstock-ignored-hints") == (None if order == "priority" else "cache_control")
        for number in range(1, 16):
            ask(cluster, number)
        assert (ask(cluster, 0)[0] > 0) == (order == "priority")
        assert ask(cluster, 1)[0] == 0
        explained = cluster.get(f"/admin/explain/{headers['x-penstock-request-id']}")[1]["request"]
        assert explained["ignored_hints"] == ([] if order == "priority" else ["cache_control"])
