"""Refused messages: counts and findings of untrusted messages to this frontend, for status and doctor."""

from typing import NamedTuple

from penstock.adapters.planes.nats_plane import NatsPlane
from penstock.adapters.seams import Store
from penstock.router.status_rows import StatusFinding
from penstock.runtime.backends import Plane
from penstock.runtime.cluster_state.membership import Membership
from penstock.runtime.cluster_state.placement_sync import PlacementSync
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds

SAME_SECRET = "give all processes of the cluster the same PENSTOCK_CLUSTER_SECRET, or let one supervisor start them"
SAME_RELEASE = "processes of one cluster run the same release; update this one"


class MessageSources(NamedTuple):
    """What a frontend gets messages of others from; ``plane`` and ``peers`` are None until they are open."""

    store: Store
    plane: Plane | None
    peers: PlacementSync | None
    membership: Membership
    feeds: KvEventFeeds


def refusals(sources: MessageSources) -> dict[str, int]:
    """Return how often each kind of message was refused; names as in ``penstock_notes_total``."""
    codec, plane, peers = getattr(sources.store, "codec", None), sources.plane, sources.peers
    counts = {
        "store_entry_foreign": getattr(codec, "foreign", 0),
        "store_entry_newer": getattr(codec, "newer", 0) + sources.membership.newer,
        "kv_events_refused": sources.feeds.handshakes_failed,
        **{f"kv_events_left_out_{reason}": count for reason, count in sources.feeds.left_out.items()},
    }
    if isinstance(plane, NatsPlane):
        counts["plane_message_foreign"] = plane.foreign
        counts["plane_message_newer"] = plane.newer
    elif plane is not None:
        counts["plane_refused"] = plane.others.failed
        counts["plane_stranger"] = plane.strangers.failed
        counts["plane_message_newer"] = plane.newer
    if peers is not None:
        counts["peer_message_newer"] = peers.newer
        counts["peer_message_malformed"] = peers.malformed
    return {name: count for name, count in counts.items() if count}


def findings(sources: MessageSources) -> list[StatusFinding]:
    """Return findings about refused messages, with the operator's next step."""
    counts = refusals(sources)
    findings: list[StatusFinding] = []

    def say(text: str, hint: str) -> None:
        findings.append(StatusFinding("warning", text, hint))

    foreign = counts.get("store_entry_foreign", 0)
    if foreign:
        where = getattr(sources.store, "root", "the store")
        say(f"{foreign} entries in {where} are not signed with this cluster's secret and are left out", SAME_SECRET)
    if isinstance(sources.plane, NatsPlane):
        if sources.plane.foreign:
            say(f"{sources.plane.foreign} placements in NATS are not signed with this cluster's secret", SAME_SECRET)
        if sources.plane.problem is not None:
            say(
                f"NATS can't be reached, so frontends do not hear each other's placements: {sources.plane.problem}",
                "traffic goes on, each router by what it knows itself; see discovery.nats",
            )
    elif sources.plane is not None and sources.plane.others.failing:
        count = len(sources.plane.others.failing)
        say(f"{count} other frontend{'s' if count > 1 else ''} of this cluster refuse our secret", SAME_SECRET)
    strangers = counts.get("plane_stranger", 0)
    if strangers:
        say(f"{strangers} tries to hear this frontend's placements without the cluster's secret", SAME_SECRET)
    refused = sources.feeds.refused
    if refused:
        names = ", ".join(str(target) for target in refused)
        say(f"KV events of {names} can't be heard: another cluster secret", SAME_SECRET)
    strange = [name for name in ("type", "medium") if counts.get(f"kv_events_left_out_{name}")]
    if strange:
        say(
            f"KV events are left out for a {' and a '.join(strange)} that this release does not know",
            "what routers expect in caches may be too little; the engine is newer than this release",
        )
    newer = sum(counts.get(name, 0) for name in ("store_entry_newer", "plane_message_newer", "peer_message_newer"))
    if newer:
        say(f"{newer} messages of a newer release were refused", SAME_RELEASE)
    return findings
