"""How do the tests start a vLLM server with tiers, ask it the same prompts again, and damage what it stored?"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from tests.live.cluster import request, until
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.server import BLOCK, VllmServer, events_config

PROMPTS, TOKENS = 5, 960
"""Each prompt has 30 blocks."""
CACHED = TOKENS - BLOCK
"""Tokens of a prompt that can come from a cache at the least: vLLM always computes the last ones."""
FLIPPED = 400
"""Bytes of each block that are flipped: 128 KiB in all."""
ROW = 128 << 10
"""Bytes of a block of the tiny model."""


def prompts(seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 2000) for _ in range(TOKENS)] for _ in range(PROMPTS)]


class Tiered(VllmServer):
    """A server with a KV connector."""

    async def answers(self, asked: Sequence[list[int]], **fields: Any) -> list[Answer]:
        """Ask one prompt after the other."""
        got = []
        async with asking() as http:
            for prompt in asked:
                answer = await ask(http, self.url, completion(prompt, return_token_ids=True, **fields))
                assert answer.status == 200, answer.error
                got.append(answer)
        return got

    def forget(self) -> None:
        """Empty its own cache and vLLM's host tier; what is below stays."""
        self.settled()
        until(lambda: request(f"{self.url}/reset_prefix_cache?reset_external=true", b"")[0] == 200, 20.0)


@contextmanager
def tiered(venv: Path, checkpoint: Path, log: Path, connector: dict[str, Any], *more: str) -> Iterator[Tiered]:
    """Run a server while the block runs. ``more``: further flags."""
    flags = ["--num-gpu-blocks-override", "80", "--prefix-caching-hash-algo", "sha256_cbor"]
    flags += ["--kv-transfer-config", json.dumps(connector), "--kv-events-config", events_config("kv@tiered"), *more]
    server = Tiered(venv, checkpoint, free_port(), log, flags=flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def native(*secondary: dict[str, Any], host: int = 32 << 20, **extra: Any) -> dict[str, Any]:
    """Return the configuration of vLLM's own tiering, with our spec since this is a CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "PenstockOffloadingSpec",
            "spec_module_path": "penstock_kv.inside.vllm_offload_spec",
            "cpu_bytes_to_use": host,
            "secondary_tiers": list(secondary),
            **extra,
        },
    }


def flip(folder: Path) -> int:
    """Flip bytes in each block file; return how many files that were."""
    rng = random.Random(1)
    files = sorted(folder.rglob("*.bin"))
    for file in files:
        data = bytearray(file.read_bytes())
        for _ in range(FLIPPED):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        file.write_bytes(data)
    return len(files)
