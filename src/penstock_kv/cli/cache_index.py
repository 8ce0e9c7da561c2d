"""Compares what routers believe that an engine's tiers have with what the tier process has."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from penstock.cli.shared.admin_client import AdminClient

if TYPE_CHECKING:
    from penstock_kv.tiers.tier_admin_client import TierAdminClient

BELOW = {"host": ["host"], "disk": ["disk", "object"]}
"""Tiers of the router's index -> those of the tier process: KV events have one word for all below host memory."""
SETTLING = 2.0
"""Seconds between two looks: what both see is no block that was on its way."""
EXAMPLES = 3
LATER = "an engine without requests tells of its last ones with its next request"
NAME = 8
"""Bytes of a hash in KV events."""


class Difference(NamedTuple):
    """What one router believes of one tier of one engine, beside what is there; hashes as KV events have them.

    Args:
        absent: believed, but the tier has not.
        unknown: the tier has, but the router does not know.
        unnamed: blocks of the tier that no engine was told of, because none has asked for them since a restart.
        own: blocks of host memory that the engine has beside the tiers, and may announce as well.
    """

    router: str
    worker: str
    tier: str
    state: str
    believed: int
    stored: int
    absent: frozenset[int]
    unknown: frozenset[int]
    unnamed: int
    own: int

    @property
    def wrong(self) -> bool:
        """Whether a difference is more than a router need know, or an engine's own host memory may explain."""
        return bool(self.unknown) or len(self.absent) > self.own

    def text(self) -> str:
        """Return it as lines for people."""
        place = f"index of {self.router}: {self.worker} {self.tier}"
        head = f"{place}: {self.believed:,} blocks believed, {self.stored:,} there"
        if self.state != "exact":
            return f"{head}; not compared, since what it knows of {self.worker} is {self.state}"
        lines = [head if self.absent or self.unknown else f"{head}, the same"]
        if self.unnamed:
            lines.append(f"  {self.unnamed:,} more are of an earlier run, and nobody has asked for them yet")
        if self.absent:
            why = (
                ""
                if len(self.absent) > self.own
                else f"; they may be among {self.own:,} in the engine's own host memory"
            )
            lines.append(f"  {len(self.absent):,} are believed and not there, such as {_examples(self.absent)}{why}")
        if self.unknown:
            lines.append(f"  {len(self.unknown):,} are there and not known, such as {_examples(self.unknown)}; {LATER}")
        return "\n".join(lines)


def compare(client: "TierAdminClient", cluster: AdminClient) -> list[Difference]:
    """Return one difference for each router, engine and tier; what moves meanwhile is left out.

    Raises:
        ClusterUnreachable, RequestRefused: no frontend answers, or it does not know the engine.
    """
    first = _look(client, cluster)
    if not any(each.absent or each.unknown for each in first.values()):
        return list(first.values())
    time.sleep(SETTLING)
    return [
        each._replace(absent=each.absent & first[place].absent, unknown=each.unknown & first[place].unknown)
        for place, each in _look(client, cluster).items()
        if place in first
    ]


def _look(client: "TierAdminClient", cluster: AdminClient) -> Mapping[tuple[str, str, str], Difference]:
    from penstock.frontend.admin.admin_answers import WorkerIndex
    from penstock_kv.inside.tier_protocol import READ_BACK
    from penstock_kv.tiers.tier_admin_protocol import BlockHashes, ListHashes

    answers = {tier: client.ask(ListHashes(tiers=parts), BlockHashes) for tier, parts in BELOW.items()}
    differences: dict[tuple[str, str, str], Difference] = {}
    for worker, rows in answers["host"].rows.items():
        index = cluster.get(f"/admin/index/{quote(worker, safe='')}", WorkerIndex)
        for router in index.routers:
            for tier, believed in (("host", frozenset(router.host)), ("disk", frozenset(router.disk))):
                stored = frozenset(_split_hashes(answers[tier].names)).difference(_split_hashes(READ_BACK[-NAME:]))
                exact = router.state == "exact"
                differences[router.router, worker, tier] = Difference(
                    router=router.router,
                    worker=worker,
                    tier=tier,
                    state=router.state,
                    believed=len(believed),
                    stored=len(stored),
                    absent=believed - stored if exact else frozenset(),
                    unknown=stored - believed if exact else frozenset(),
                    unnamed=answers[tier].unnamed,
                    own=rows if tier == "host" else 0,
                )
    return differences


def _split_hashes(names: bytes) -> list[int]:
    return [int.from_bytes(names[place : place + NAME], "big") for place in range(0, len(names), NAME)]


def _examples(hashes: frozenset[int]) -> str:
    return ", ".join(f"{value:016x}" for value in sorted(hashes)[:EXAMPLES])
