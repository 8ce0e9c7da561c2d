"""Run folders that tests look at: made by hand, with names that would like to be HTML."""

import random
from pathlib import Path

import msgspec

from penstock.kernel.request_record import RequestLeg, RequestRecord, summarise_gaps

NASTY = "</script><script>alert(1)</script><b>&"


def record(number: int, rng: random.Random) -> RequestRecord:
    ttft = rng.lognormvariate(-2, 1)
    itl = summarise_gaps([(0.0, 1), (0.1, 7)])
    return RequestRecord(
        id=f"r{number}",
        arrival=number / 4,
        model=NASTY,
        outcome="ok" if number % 9 else "rejected",
        reason="" if number % 9 else 'full, "very" <full>',
        isl=1000,
        osl=8,
        cached=number % 7 * 100,
        legs=[RequestLeg(role="aggregated", worker=f"w<{number % 3}>" if number % 5 else NASTY, dispatched=0.0)],
        ttft=ttft,
        e2e=ttft + 0.1,
        itl=itl,
    )


def live_folder(folder: Path) -> Path:
    """Write a live cluster's folder: nothing of a bench in it."""
    rng = random.Random(1)
    lines = [msgspec.json.encode(record(number, rng)) for number in range(200)]
    (folder / "requests.jsonl").write_bytes(b"\n".join(lines) + b"\n" + lines[0][:30])
    return folder
