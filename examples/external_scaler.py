"""An orchestrator of your own that follows a planner's decisions: replace `scale` by what starts and ends your workers.

    penstock planner examples/planner-virtual.yaml        # writes decisions into an etcd
    python examples/external_scaler.py http://127.0.0.1:2379 dynamo

It prints a line of JSON for each decision that it has carried out.
"""

import argparse
import asyncio
import json
import sys

from penstock_dynamo.virtual.virtual_keys_access import VirtualDecision, connect


async def scale(decision: VirtualDecision) -> None:
    """Make it so many workers; return when they serve, and when those that go have finished what they had."""
    sys.stdout.write(json.dumps(decision._asdict()) + "\n")
    sys.stdout.flush()


async def main(urls: list[str], namespace: str, every: float) -> None:
    """Carry out one decision after the other, for ever."""
    client = connect(urls, namespace, every=every)
    try:
        while True:
            decision = await client.wait()
            await scale(decision)
            await client.complete(decision)
    finally:
        await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Carry out what a planner decides.")
    parser.add_argument("etcd", help="URL of the etcd; several with commas between them")
    parser.add_argument("namespace", nargs="?", default="dynamo")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    given = parser.parse_args()
    try:
        asyncio.run(main(given.etcd.split(","), given.namespace, given.every))
    except KeyboardInterrupt:
        sys.exit(130)
