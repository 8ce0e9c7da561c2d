"""Measures, on a GPU, the time to the first token of a prompt that is computed, and of one that a KV tier brings back.

usage: PENSTOCK_VLLM_VENV=VENV python bench/tiers/gpu.py MODEL [--tokens 8192] [--ways native,tier,connector]

VENV has vLLM and Penstock (pip install --no-deps), MODEL is a folder with config.json and a tokenizer: weights are
drawn (--load-format dummy), since times do not depend on them. Per way one server is started. Six prompts are computed;
the last is asked five times again, from the GPU's own cache; then, three times, that cache is emptied and all are asked
again. Tables have medians.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from penstock.adapters.listen_address import free_port
from tests.live.cluster import request
from tests.vllm.server import MODEL, VllmServer
from tests.vllm.tiers.processes import TierProcess
from tests.vllm.tiers.tiered import native

PROMPTS, ROUNDS, HITS = 6, 3, 5
HOST, STAGING = 12 << 30, 2 << 30
"""Bytes: room for all prompts, and for two of an 8B model with 8,192 tokens each."""
BLOCKS = 4500
"""Of 16 tokens: the GPU has room for all prompts, too."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ways", default="native,tier,connector")
    options = parser.parse_args(arguments)
    venv = os.environ.get("PENSTOCK_VLLM_VENV")
    if not venv:
        parser.error("PENSTOCK_VLLM_VENV has to name an environment with vLLM")
    print("| way | computed ms | the GPU's own cache ms | brought back ms | prompts brought back |")
    print("|---|---:|---:|---:|---:|")
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory(prefix="tiers-gpu-") as folder, connector(way, Path(folder)) as config:
            asyncio.run(measure(way, Path(venv), options.model, options.tokens, config, Path(folder)))
    return 0


@contextmanager
def connector(way: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Return the configuration of vLLM's connector, with the tier process that it needs."""
    if way == "native":
        yield native(host=HOST)
        return
    process = TierProcess(folder)
    process.start(host=HOST)
    try:
        if way == "tier":
            tier = {
                "type": "PenstockTier",
                "module_path": "penstock_kv.inside.vllm_tier",
                "socket": str(process.socket),
            }
            yield native(tier, host=STAGING)
        else:
            yield {
                "kv_connector": "PenstockConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "penstock_kv.inside.vllm_connector",
                "kv_connector_extra_config": {"socket": str(process.socket), "staging_bytes": 2 * STAGING},
            }
    finally:
        process.kill()


async def measure(way: str, venv: Path, model: Path, tokens: int, config: dict[str, Any], folder: Path) -> None:
    """Print a row."""
    flags = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", str(tokens + 64), "--block-size", "16"]
    flags += ["--max-num-batched-tokens", str(tokens), "--num-gpu-blocks-override", str(BLOCKS)]
    flags += ["--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config", json.dumps(config)]
    server = VllmServer(venv, model, free_port(), folder / "vllm.log", flags=flags)
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 2000) for _ in range(tokens)] for _ in range(PROMPTS + 1)]
    try:
        server.wait_ready()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
            for _ in range(2):
                await first_token(http, server.url, prompts[-1])  # warm
            computed = [await first_token(http, server.url, prompt) for prompt in prompts[:-1]]
            own = [await first_token(http, server.url, prompts[-2]) for _ in range(HITS)]
            await asyncio.sleep(3.0)  # what is under way is stored
            back = []
            for _ in range(ROUNDS):
                request(f"{server.url}/reset_prefix_cache", b"")
                back += [await first_token(http, server.url, prompt) for prompt in prompts[:-1]]
                await asyncio.sleep(1.0)
    finally:
        server.stop()
    restored = sum(cached > tokens // 2 for _, cached in back)
    times = " | ".join(f"{1e3 * median(seconds for seconds, _ in each):.0f}" for each in (computed, own, back))
    print(f"| {way} | {times} | {restored} of {len(back)} |", flush=True)


async def first_token(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[float, int]:
    """Ask; return seconds until the first token, and how many of the prompt's tokens were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, cached = perf_counter(), 0.0, 0
    async with http.post(f"{url}/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"] and not first:
                    first = perf_counter() - began
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or cached
    return first, cached


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
