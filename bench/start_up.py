"""Where do the seconds of a vLLM server's start go, and what do a sibling's weights and kept caches save?

usage: python bench/start_up.py [--rounds N] [--mib N] [--compile] [--docs docs/bench/start-up.md]

PENSTOCK_VLLM_VENV names an environment with vLLM (CPU build). Every round starts one server in each way, one after the
other, so that a busy machine slows all of them alike; the table has medians.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from penstock.adapters.engines.start_log import VllmStart
from penstock.adapters.listen_address import free_port
from penstock_kv.inside.weights.weight_protocol import LOAD_FORMAT, WEIGHTS_ENV
from penstock_lab.report.markdown import write_part

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 500.0
WAYS = {
    "disk, cold page cache": "files that nobody has read yet",
    "disk, warm page cache": "files that a server of this machine has read before: what the weight process keeps so",
    "sibling over TCP, own files cold": "a weight process of the same machine over loopback; own files unread",
}
PHASES = ("import", "weights", "compile", "warm-up", "probe")
RECIPE = """\
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=int(sys.argv[2]),
    num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
    pad_token_id=0, tie_word_embeddings=False)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1], safe_serialization=True)
"""
LAYER_MIB = 23.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=float, default=300.0, help="size of the checkpoint")
    parser.add_argument("--compile", action="store_true", help="also measure a start with and without compile cache")
    parser.add_argument("--docs", type=Path, help="page whose measured part is replaced")
    options = parser.parse_args()
    venv = Path(os.environ["PENSTOCK_VLLM_VENV"])
    with tempfile.TemporaryDirectory(prefix="penstock-start-", dir=ROOT / "build") as text:
        report = measure(venv, Path(text), options.rounds, max(1, round(options.mib / LAYER_MIB)), options.compile)
    print(report)
    if options.docs is not None:
        write_part(options.docs, report)
    return 0


def measure(venv: Path, work: Path, rounds: int, layers: int, compiles: bool) -> str:
    """Return the measured page."""
    holder, mine = work / "holder", work / "mine"
    subprocess.run([venv / "bin/python", "-c", RECIPE, str(holder), str(layers)], check=True, capture_output=True)
    subprocess.run([venv / "bin/python", ROOT / "tests/vllm/setup/checkpoint.py", work / "tiny"], check=True)
    for path in (work / "tiny").glob("*token*"):
        shutil.copy(path, holder)
    shutil.copytree(holder, mine)
    size = sum(path.stat().st_size for path in mine.glob("*.safetensors"))
    plugins = work / "plugins" / "penstock-0.dist-info"
    plugins.mkdir(parents=True)
    (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0\n")
    (plugins / "entry_points.txt").write_text(
        "[vllm.general_plugins]\npenstock = penstock_kv.inside.weights.vllm_weights:register\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{plugins.parent}", **cpu_env()}
    results: dict[str, list[dict[str, float | None]]] = {name: [] for name in WAYS}
    texts: dict[str, str] = {}
    secret = {"PENSTOCK_CLUSTER_SECRET": "a secret of this measurement"}
    serve = [sys.executable, "-m", "penstock", "weights", "serve"]
    port, path = free_port(), work / "w" / "mine.sock"
    listen = [*serve, str(holder), "--socket", str(work / "h" / "holder.sock"), "--listen", f"127.0.0.1:{port}"]
    ask = [*serve, str(mine), "--socket", str(path), "--sibling", f"127.0.0.1:{port}"]
    with Child(listen, {**env, **secret}), Child(ask, {**env, **secret}):
        for number in range(rounds):
            for name in random.Random(number).sample(list(WAYS), len(WAYS)):
                evict(mine) if "cold" in name else warm(mine)
                more = {WEIGHTS_ENV: str(path)} if name.startswith("sibling") else {}
                flags = ["--load-format", LOAD_FORMAT] if more else []
                told, texts[name] = start(venv, mine, work / "vllm.log", {**env, **more}, [*flags, "--enforce-eager"])
                results[name].append(told)
                print(f"round {number + 1}, {name}: {json.dumps(told)}", file=sys.stderr, flush=True)
    kept: list[dict[str, float | None]] = []
    if compiles:
        cache = {"VLLM_CACHE_ROOT": str(work / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
        kept = [start(venv, mine, work / "vllm.log", {**env, **cache}, [])[0] for _ in range(2)]
    return page(results, kept, size, rounds, len(set(texts.values())) == 1)


class Child:
    """A weight process; it runs within ``with``."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)

    def __enter__(self) -> "Child":
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"{"), "the weight process did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


def start(
    venv: Path, model: Path, log: Path, env: Mapping[str, str], flags: list[str]
) -> tuple[dict[str, float | None], str]:
    """Start a server, end it; return seconds by phase, with their whole, and its text at temperature 0."""
    port = free_port()
    command = [str(venv / "bin/vllm"), "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "bfloat16"]
    command += ["--block-size", "32", "--num-gpu-blocks-override", "64", *flags]
    reader, offset, born = VllmStart(), 0, time.monotonic()
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**env, "PATH": path}, start_new_session=True)
    try:
        while True:
            data = log.read_bytes()[offset:]
            lines, _, _ = data.rpartition(b"\n")
            offset += len(lines)
            for line in lines.decode(errors="replace").splitlines():
                reader.read(line, time.monotonic())
            if answers(f"http://127.0.0.1:{port}/health"):
                break
            if process.poll() is not None or time.monotonic() - born > LIMIT:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        served = time.monotonic()
        body = json.dumps({"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 16, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if "--load-format" in flags:
        assert "Weights came from" in log.read_text(errors="replace"), log.read_text(errors="replace")[-3000:]
    return {**reader.phases(born, served), "whole": served - born}, text


def page(
    results: Mapping[str, list[dict[str, float | None]]],
    kept: list[dict[str, float | None]],
    size: int,
    rounds: int,
    same: bool,
) -> str:
    rows = [[name, *cells(told), f"{len(told)}"] for name, told in results.items()]
    rows += [
        [f"compile cache {word}", *cells([told]), "1"] for word, told in zip(("empty", "kept"), kept, strict=False)
    ]
    lines = ["| start | " + " | ".join([*PHASES, "whole"]) + " | starts |", "|---|" + "---:|" * (len(PHASES) + 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    about = f"vLLM's CPU build, {os.cpu_count()} cores, checkpoint of {size / 1e6:.0f} MB (bfloat16, random weights), "
    about += f"medians of {rounds} rounds in seconds, the ways in another order each round. "
    about += f"Text at temperature 0: {'the same in every way' if same else 'DIFFERS'}."
    return about + "\n\n" + "\n".join(lines) + "\n"


def cells(told: list[dict[str, float | None]]) -> list[str]:
    found = []
    for phase in (*PHASES, "whole"):
        values = [value for each in told if (value := each[phase]) is not None]
        found.append(f"{statistics.median(values):.2f}" if values else "?")
    return found


def cpu_env() -> dict[str, str]:
    sys.path.insert(0, str(ROOT))
    from tests.vllm.server import CPU_ENV, SPAWNED

    return {**CPU_ENV, **SPAWNED}


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def warm(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.read_bytes()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
