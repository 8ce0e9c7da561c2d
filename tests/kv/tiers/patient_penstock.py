"""The `penstock` command for tests whose tier processes are peers: it waits for a peer as long as a test would.

The product waits 20 ms for a peer's answer, since a request waits with it, and leaves a late peer alone for ten
seconds. On a machine that runs other tests as well an answer was seen to take 48 ms: that is a miss, and so is all that
follows.
"""

import sys

from penstock.cli.main import main
from penstock.kernel.machine import SECOND
from penstock_kv.blocks.tiers import tier_jobs
from penstock_kv.tiers import peer_tiers

PATIENCE = 20

if __name__ == "__main__":
    tier_jobs.PEER_DEADLINE = PATIENCE * SECOND
    peer_tiers.ASK = float(PATIENCE)
    sys.exit(main())
