"""What does an answer by rendered tokens, vLLM's generate route and derendered words cost beside our own path?

usage: python bench/front_door.py CHECKPOINT [--rounds N] [--docs docs/bench/front-door.md]

PENSTOCK_VLLM_VENV names an environment with vLLM (CPU build). One server and one render process; each round asks every
shape of request in every way, the ways in another order each time, so that a busy machine slows all of them alike.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock.adapters.listen_address import free_port  # noqa: E402
from penstock_lab.report.markdown import write_part  # noqa: E402
from penstock_lab.traffic.prompt_maker import words  # noqa: E402
from tests.frontend.stand import Stand  # noqa: E402
from tests.vllm.server import VllmServer  # noqa: E402
from tests.vllm.test_front_door import PARSERS, TOOL, RenderProcess, answered, front  # noqa: E402

SHAPES: dict[str, Any] = {
    "a sentence": "Name a city.",
    "150 words": words(150, seed=8),
    "500 words": words(500, seed=7),
}
WAYS = {
    "own": "tokenised here, the chat goes to the engine whole (`render: off`)",
    "rendered": "tokens by the render process, the chat goes to the engine whole",
    "by tokens": "those tokens go to the generate route; words by the engine (stream) or derendered (whole)",
}


class Sample(NamedTuple):
    """One request, or one group of them: seconds, and seconds of CPU of the engine's process."""

    seconds: float
    engine: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--docs", type=Path, help="page whose measured part is replaced")
    options = parser.parse_args()
    report = asyncio.run(measured(Path(os.environ["PENSTOCK_VLLM_VENV"]), options.checkpoint, options.rounds))
    print(report)
    if options.docs is not None:
        write_part(options.docs, report)
    return 0


async def measured(venv: Path, checkpoint: Path, rounds: int) -> str:
    """Return the measured part of the page."""
    with tempfile.TemporaryDirectory(prefix="penstock-door-") as text:
        folder = Path(text)
        flags = ["--enable-scale-out", *PARSERS]
        server = VllmServer(venv, checkpoint, free_port(), folder / "serve.log", flags=flags)
        render = RenderProcess(venv, checkpoint, free_port(), folder / "render.log")
        try:
            server.wait_ready()
            render.wait_ready()
            async with AsyncExitStack() as stack:
                own = await stack.enter_async_context(front(server, checkpoint, "off"))
                rendered = await stack.enter_async_context(front(server, checkpoint, render.url, routes="none"))
                tokens = await stack.enter_async_context(front(server, checkpoint, render.url))
                stands = dict(zip(WAYS, (own, rendered, tokens), strict=True))
                return page(await asked(stands, server.process.pid, rounds), rounds)
        finally:
            for each in (server, render):
                each.terminate()
            for each in (server, render):
                each.stop()


async def asked(stands: dict[str, Stand], pid: int, rounds: int) -> dict[tuple[str, str, str], list[Sample]]:
    """Ask every shape in every way; the first round is not counted: it fills the engine's prefix cache."""
    samples: dict[tuple[str, str, str], list[Sample]] = {}
    requests = {
        (shape, kind): body(text, kind)
        for shape, text in SHAPES.items()
        for kind in ("stream", "whole", "tools, whole")
    }
    for number in range(rounds + 1):
        for (shape, kind), given in requests.items():
            for way in random.Random(number).sample(list(WAYS), len(WAYS)):
                sample = await timed(stands[way], pid, given, 1)
                if number:
                    samples.setdefault((shape, kind, way), []).append(sample)
        for way in random.Random(number).sample(list(WAYS), len(WAYS)):
            sample = await timed(stands[way], pid, body(SHAPES["500 words"], "stream"), 8)
            if number:
                samples.setdefault(("500 words, 8 at once", "stream", way), []).append(sample)
    return samples


def body(text: str, kind: str) -> dict[str, Any]:
    """Return a request with one token of output, so that what is measured is the way."""
    given: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    if kind == "stream":
        given |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind.startswith("tools"):
        given["tools"] = [{"type": "function", "function": TOOL}]
    return given


async def timed(stand: Stand, pid: int, given: dict[str, Any], count: int) -> Sample:
    before, started = cpu(pid), time.perf_counter()
    await asyncio.gather(*(answered(stand, given) for _ in range(count)))
    return Sample(time.perf_counter() - started, cpu(pid) - before)


def cpu(pid: int) -> float:
    """Return the seconds of CPU that the threads of a process have used."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def page(samples: dict[tuple[str, str, str], list[Sample]], rounds: int) -> str:
    """Return the table."""
    lines = [
        f"vLLM's CPU build, 2 cores, the tiny model of the tests, one token of output; medians of {rounds} rounds in "
        "ms; in brackets the median CPU time of the engine's process.",
        "",
        "| prompt | answer | " + " | ".join(WAYS) + " |",
        "|---|---|" + "---:|" * len(WAYS),
    ]
    for shape, kind in dict.fromkeys((shape, kind) for shape, kind, _ in samples):
        cells = []
        for way in WAYS:
            mine = samples[shape, kind, way]
            median = statistics.median(sample.seconds for sample in mine) * 1e3
            engine = statistics.median(sample.engine for sample in mine) * 1e3
            cells.append(f"{median:.1f} ({engine:.1f})")
        lines.append(f"| {shape} | {kind} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- **{name}**: {text}." for name, text in WAYS.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
