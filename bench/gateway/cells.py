"""Which situations are measured? Each a dict of what `load.py` takes; ``only`` names the gateways that it is for."""

from typing import Any

OURS = ("ours", "ours-full", "ours-two")
FULL = ("ours-full", "dynamo")

CELLS: dict[str, dict[str, Any]] = {}

for words in (100, 2000):
    for streamed in (False, True):
        for concurrency in (1, 16, 64):
            how = "stream" if streamed else "unary"
            CELLS[f"{how} w{words} new c{concurrency}"] = {
                "stream": streamed,
                "words": words,
                "concurrency": concurrency,
                "kind": "new",
            }
for words in (100, 2000):
    for kind in ("cold", "repeated", "turns"):
        CELLS[f"unary w{words} {kind} c16"] = {"words": words, "kind": kind, "concurrency": 16}
for streamed in (False, True):
    how = "stream" if streamed else "unary"
    CELLS[f"{how} w100 new 100/s"] = {"stream": streamed, "rate": 100.0, "times": 3}
    # A client that does not acknowledge at once: a gateway without TCP_NODELAY makes it wait 40 ms.
    CELLS[f"{how} w100 stall c1"] = {"stream": streamed, "quickack": False, "concurrency": 1}
CELLS["paced w100 c64"] = {"stream": True, "tokens": 64, "gap_ms": 10, "concurrency": 64, "times": 3, "warm": 1.0}

HOLD: dict[str, Any] = {"count": 10_000}
