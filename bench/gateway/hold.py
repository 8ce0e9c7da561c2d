"""How much memory does an idle connection cost a gateway? Open many, ask once on each, and look.

usage: python hold.py '{"port": 8000, "pids": [12], "count": 10000}'    (prints JSON)
"""

import asyncio
import json
import resource
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop
from load import Client, request
from prompts import bodies

BATCH = 100
"""Connections that are opened and asked at the same time."""


def resident(pids: list[int]) -> int:
    """Return the bytes that processes hold in memory, each page counted once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


async def main(asked: dict[str, Any]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    count, pids = asked["count"], asked["pids"]
    raw = request(next(bodies("new", 100, 5, stream=False, tokens=16, gap_ms=0)))

    async def opened() -> Client:
        _, client = await loop.create_connection(lambda: Client(False, True), "127.0.0.1", asked["port"])
        await asyncio.wait_for(client.ask(raw), 30)
        return client

    # What a first burst makes the process keep anyway does not count.
    for client in await asyncio.gather(*(opened() for _ in range(BATCH))):
        client.transport.close()
    await asyncio.sleep(1.0)
    before = resident(pids)
    held: list[Client] = []
    numbers = iter(range(count))
    while batch := list(islice(numbers, BATCH)):
        held += await asyncio.gather(*(opened() for _ in batch))
    await asyncio.sleep(1.0)
    after = resident(pids)
    alive = sum(not client.transport.is_closing() for client in held)
    return {"held": alive, "bytes_per_connection": (after - before) / max(1, alive)}


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(uvloop.run(main(json.loads(sys.argv[1])))))
