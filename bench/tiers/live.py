"""Do tiers do in a real vLLM what `penstock simulate` says? Small traces with evictions, without tiers and with two.

usage: python bench/tiers/live.py [--requests 120] [--docs docs/bench/tiers.md]

A vLLM of the CPU build with a tiny model, in the environment that `make test-vllm` makes (PENSTOCK_VLLM_VENV, else
.venv-vllm), answers one request after the other: so the order of events is that of the simulation, which gets the same
trace as a file, an engine with as many blocks, and `--host-cache` and `--disk-cache` of the same sizes. TTFT is what
this machine makes of it, and the simulation says nothing of it: its engine is not fitted to the tiny model.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # servers are started as the tests do it
# ruff: noqa: E402


from penstock.adapters.listen_address import free_port
from penstock_kv.tiers.tier_admin_client import TierAdminClient
from penstock_kv.tiers.tier_admin_protocol import AskStat, CacheStat
from penstock_lab.report.markdown import write_part
from penstock_lab.traffic.formats.mooncake import mooncake_lines
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.engine_venv import made
from tests.live.cluster import stream
from tests.vllm.server import BLOCK, MODEL, VllmServer
from tests.vllm.tiers.processes import TierProcess

PROMPTS, TOKENS, OUTPUT = 12, 960, 2
"""Each prompt has 30 blocks."""
GPU_BLOCKS = 80
ROW = 128 << 10
"""Bytes of a block of the tiny model."""
TIERS = {"none": (0, 0), "host": (200 * ROW, 0), "host and disk": (100 * ROW, 180 * ROW)}
"""Name -> bytes of host memory and of disk. All prompts have 360 blocks, so that each tier evicts, too."""
STAGING = 32 << 20
SEEDS = (7, 8, 9)
"""Of the traces."""
APART = 60.0
"""Seconds between simulated requests: one at a time."""


class Outcome(NamedTuple):
    """Of one run: share of the prompts' tokens that came from a cache, which tier had them, and TTFTs in seconds."""

    hit_rate: float
    tiers: Mapping[str, float]
    ttfts: Sequence[float] = ()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    place = f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} shared cores"
    lines = [
        f"**Live: vLLM 0.32 (CPU build), a tiny model**, {place}: {len(SEEDS)} traces of {options.requests} requests "
        f"one after the other, for {PROMPTS} prompts of {TOKENS} tokens at random; {GPU_BLOCKS} blocks of {BLOCK} "
        "tokens in vLLM. Shares of the prompts' tokens, one for each trace; TTFT of all.",
        "",
        "| tiers | hit rate | simulated | of it host | simulated | disk | simulated | TTFT mean | TTFT median |",
        "|---|---|---|---|---|---|---|---:|---:|",
    ]
    for label, (host, disk) in TIERS.items():
        orders = [numbers(options.requests, seed) for seed in SEEDS]
        pairs = [(measure(options.venv, order, host, disk), predicted(order, host, disk)) for order in orders]
        cells = [", ".join(f"{each.hit_rate:.1%}" for each in side) for side in zip(*pairs, strict=True)]
        for tier in ("host", "disk"):
            cells += [
                ", ".join(f"{each.tiers.get(tier, 0.0):.1%}" for each in side) for side in zip(*pairs, strict=True)
            ]
        ttfts = [1e3 * ttft for live, _ in pairs for ttft in live.ttfts]
        sizes = [f"{name} {size / (1 << 20):g} MiB" for name, size in (("host", host), ("disk", disk)) if size]
        row = [", ".join(sizes) or label, *cells, f"{mean(ttfts):,.0f} ms", f"{median(ttfts):,.0f} ms"]
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text, "live")
    return 0


def numbers(requests: int, seed: int) -> list[int]:
    """Return which prompt each request of a trace has."""
    rng = random.Random(seed)
    return [rng.randrange(PROMPTS) for _ in range(requests)]


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(10, 2000) for _ in range(TOKENS)]


def measure(venv: Path, order: Sequence[int], host: int, disk: int) -> Outcome:
    """Ask a server of its own."""
    checkpoint = made(venv, ROOT / "tests/vllm/setup/checkpoint.py", "vllm-model")
    flags = ["--num-gpu-blocks-override", str(GPU_BLOCKS), "--prefix-caching-hash-algo", "sha256_cbor"]
    with tempfile.TemporaryDirectory(prefix="tiers-") as name:
        folder = Path(name)
        process = TierProcess(folder)
        if host:
            process.start(host=host, disk=disk, order="lru")
            flags += ["--kv-transfer-config", json.dumps(connector(process.socket))]
        server = VllmServer(venv, checkpoint, free_port(), folder / "vllm.log", flags=flags)
        try:
            server.wait_ready()
            asked(server, [7] * 40)  # the first request is slow whatever it is
            ttfts, cached = [], 0
            for number in order:
                ttft, hit = asked(server, prompt(number))
                ttfts.append(ttft)
                cached += hit
            tokens = TOKENS * len(order)
            return Outcome(cached / tokens, hits_by_tier(process.socket, tokens) if host else {}, ttfts)
        finally:
            server.stop()
            process.stop()


def hits_by_tier(socket: Path, tokens: int) -> dict[str, float]:
    client = TierAdminClient(socket)
    tiers = client.ask(AskStat(), CacheStat).tiers
    client.close()
    return {tier.tier: tier.hits * BLOCK / tokens for tier in tiers}


def connector(socket: Path) -> dict[str, object]:
    return {
        "kv_connector": "PenstockConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "penstock_kv.inside.vllm_connector",
        # The tiny model computes faster than memory is copied, and the tier process would rightly load nothing.
        "kv_connector_extra_config": {"socket": str(socket), "staging_bytes": STAGING, "report_speed": False},
    }


def asked(server: VllmServer, tokens: list[int]) -> tuple[float, int]:
    """Ask one prompt; return the seconds until its first token, and the prompt's tokens that were cached."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    began, ttft, cached = time.monotonic(), 0.0, 0
    for event in stream(f"{server.url}/v1/completions", body | {"stream_options": {"include_usage": True}}):
        if event == "[DONE]":
            break
        answer = json.loads(event)
        if answer.get("choices") and not ttft:
            ttft = time.monotonic() - began
        if usage := answer.get("usage"):
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    server.settled()  # what it stores is in the tier before the next request, as in the simulation
    return ttft, cached


def predicted(order: Sequence[int], host: int, disk: int) -> Outcome:
    """Ask `penstock simulate` about an engine with the same caches and the same requests."""
    blocks = TOKENS // BLOCK

    def requests() -> Iterator[TrafficRequest]:
        for turn, number in enumerate(order):
            hashes = tuple(range(number * blocks + 1, (number + 1) * blocks + 1))
            yield TrafficRequest(at=turn * APART, isl=TOKENS, osl=OUTPUT, hash_ids=hashes, block_size=BLOCK)

    sim = {"block_size": BLOCK, "kv_blocks": GPU_BLOCKS - 1, "max_model_len": 2048}
    sim["transfer"] = {"kv_bytes_per_token": ROW // BLOCK}
    pool = {"replicas": 1, "sim": sim, "cache": {"order": "lru"}}
    config = {"models": {"m": {"pools": {"main": pool}}}, "router": {"mode": "round_robin"}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(json.dumps(config))
        (folder / "trace.jsonl").write_bytes(b"".join(mooncake_lines(requests())))
        command = [sys.executable, "-m", "penstock", "simulate", "cluster.yaml", "--trace", "trace.jsonl"]
        command += [
            word
            for flag, size in (("--host-cache", host), ("--disk-cache", disk))
            if size
            for word in (flag, str(size))
        ]
        command += ["--no-html", "--no-decisions", "--json", "--out", "out"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    (variant,) = json.loads(done.stdout)["variants"]
    assert variant["requests"]["ok"] == len(order), variant["requests"]
    tokens, tiers = TOKENS * len(order), variant["tokens"]["cached_by_tier"]
    return Outcome(variant["tokens"]["cached"] / tokens, {tier: count / tokens for tier, count in tiers.items()})


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--venv", type=Path, default=Path(os.environ.get("PENSTOCK_VLLM_VENV") or ROOT / ".venv-vllm"))
    parser.add_argument("--docs", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
