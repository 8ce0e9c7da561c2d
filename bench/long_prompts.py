"""What does a prompt of 100,000 tokens cost a frontend: all new, known but for its last twentieth, and repeated?

usage: python bench/long_prompts.py [--rounds N] [--docs docs/bench/long-prompts.md]

Two frontends answer for a scripted server: one as it is, and one that leaves long parts of prompts whole. Each is asked
a round's prompts in turn, so that a busy machine slows both alike. CPU is that of a frontend's process, by the
scheduler's account.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock.frontend.prompt.chat_template import ChatTemplate  # noqa: E402
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, load_tokenizer  # noqa: E402
from penstock_lab.report.markdown import write_part  # noqa: E402
from penstock_lab.sim.sim_tokenizer import WORDS  # noqa: E402
from tests.frontend.stand import Engine, stand  # noqa: E402
from tests.frontend.test_prompt_tokenizer import CHATML  # noqa: E402
from tests.frontend.tokenizer_kinds import KINDS  # noqa: E402

TOKENS = 100_000
NEW_TOKENS = 5_000
KIND_NAMES = {
    "sim": "byte-level, split by words (the simulated model's)",
    "o200k": "byte-level, split by a longer pattern (as o200k)",
    "llama2": "merges over the whole text (as Llama 2)",
}
WAYS = {"whole": "parts left whole", "segments": "as it is"}
PROMPTS = ("all new", "95 % known", "repeated")
ANSWER = json.dumps(
    {
        "id": "a",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": TOKENS, "completion_tokens": 1},
    }
).encode()

Sample = tuple[str, str, str]
"""Kind of tokenizer, way, prompt."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--docs", type=Path, help="page whose measured part is replaced")
    options = parser.parse_args()
    report = page(asyncio.run(measured(options.rounds)), options.rounds)
    print(report)
    if options.docs is not None:
        write_part(options.docs, report)
    return 0


async def measured(rounds: int) -> dict[Sample, list[float]]:
    """Return milliseconds of CPU per sample."""
    samples: dict[Sample, list[float]] = {}
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    context = multiprocessing.get_context("spawn")
    for kind in KIND_NAMES:
        frontends = {}
        for way in WAYS:
            ours, theirs = context.Pipe()
            process = context.Process(target=frontend, args=(kind, way, port, theirs), daemon=True)
            process.start()
            frontends[way] = (process, ours, await asyncio.to_thread(ours.recv))
        prompts = Prompts(tokenizer(kind))
        async with aiohttp.ClientSession() as client:
            for number in range(rounds + 1):
                for name, body in zip(PROMPTS, prompts.round(), strict=True):
                    for way in random.Random(number).sample(list(WAYS), len(WAYS)):
                        process, _, url = frontends[way]
                        spent = await asked(client, url, process.pid or 0, body)
                        if number:  # the first round is not counted
                            samples.setdefault((kind, way, name), []).append(spent)
        for process, ours, _ in frontends.values():
            ours.send("end")
            await asyncio.to_thread(process.join)
    return samples


class Prompts:
    """Prompts of one tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(7)

    def round(self) -> list[bytes]:
        """Return a new prompt, one that begins as it does, and the same again."""
        first = self._text(TOKENS)
        second = first[: len(first) * (TOKENS - NEW_TOKENS) // TOKENS] + " " + self._text(NEW_TOKENS)
        return [_body(first), _body(second), _body(second)]

    def _text(self, tokens: int) -> str:
        text = " ".join(self._rng.choices(WORDS, k=tokens))
        return text[: len(text) * tokens // len(self._tokenizer.whole(text, special=False))]


def _body(text: str) -> bytes:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": text}]
    return json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()


async def asked(client: aiohttp.ClientSession, url: str, pid: int, body: bytes) -> float:
    """Ask one request; return the milliseconds of CPU that the frontend spent on it."""
    before = _cpu(pid)
    headers = {"content-type": "application/json"}
    async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    await asyncio.sleep(0.05)  # what follows an answer is part of its cost
    return (_cpu(pid) - before) / 1e6


def _cpu(pid: int) -> int:
    """Return the nanoseconds that all threads of a process have run."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            total += int((thread / "schedstat").read_text().split()[0])
    return total


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as an engine, at once."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
            start = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n"
            writer.write(start.encode() + ANSWER)
    writer.close()


def frontend(kind: str, way: str, port: int, parent: Connection) -> None:
    """Run a frontend until the parent says so."""

    async def run() -> None:
        found = tokenizer(kind)
        if way == "whole" and found._cut is not None:
            found._cut = replace(found._cut, segment=1 << 40)
        async with stand(0, tokenizer=found) as s:
            engine = Engine("e0")
            engine.url = f"http://127.0.0.1:{port}"
            s.join(engine, block_size=16)
            parent.send(s.server.url)
            await asyncio.to_thread(parent.recv)

    asyncio.run(run())


def tokenizer(kind: str) -> PromptTokenizer:
    if kind == "sim":
        return load_tokenizer("builtin:sim", cache_bytes=256 << 20)
    return PromptTokenizer(KINDS[kind](), ChatTemplate(CHATML), cache_bytes=256 << 20)


def page(samples: dict[Sample, list[float]], rounds: int) -> str:
    """Return the measured part of the page."""
    lines = [
        f"{os.cpu_count()} cores, prompts of {TOKENS:,} tokens in one message, {NEW_TOKENS:,} of them new where the "
        f"rest is known; medians of {rounds} rounds in ms of CPU per request.",
        "",
        "| tokenizer | parts of a prompt | " + " | ".join(PROMPTS) + " |",
        "|---|---|---:|---:|---:|",
    ]
    for kind, name in KIND_NAMES.items():
        for way, meant in WAYS.items():
            found = [statistics.median(samples[kind, way, prompt]) for prompt in PROMPTS]
            lines.append(f"| {name} | {meant} | " + " | ".join(f"{value:.1f}" for value in found) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
