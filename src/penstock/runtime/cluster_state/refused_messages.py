"""Refused messages: counts and findings of untrusted messages to this frontend, for status and doctor."""

from typing import TYPE_CHECKING, Any

from penstock.adapters.planes.nats_plane import NatsPlane

if TYPE_CHECKING:
    from penstock.runtime.node.router_node import RouterNode

SAME_SECRET = "give all processes of the cluster the same PENSTOCK_CLUSTER_SECRET, or let one supervisor start them"
SAME_RELEASE = "processes of one cluster run the same release; update this one"


def refusals(node: "RouterNode") -> dict[str, int]:
    """Return how often each kind of message was refused; names as in ``penstock_notes_total``."""
    store, plane, peers = node.store, node.plane, node.peers
    counts = {
        "store_entry_foreign": getattr(store, "foreign", 0),
        "store_entry_newer": getattr(store, "newer", 0) + node.membership.newer,
        "kv_events_refused": node.feeds.handshakes_failed,
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


def findings(node: "RouterNode") -> list[dict[str, Any]]:
    """Return findings about refused messages, with the operator's next step."""
    counts = refusals(node)
    findings: list[dict[str, Any]] = []

    def say(text: str, hint: str) -> None:
        findings.append({"level": "warning", "text": text, "hint": hint})

    foreign = counts.get("store_entry_foreign", 0)
    if foreign:
        where = getattr(node.store, "root", "the store")
        say(f"{foreign} entries in {where} are not signed with this cluster's secret and are left out", SAME_SECRET)
    if isinstance(node.plane, NatsPlane):
        if node.plane.foreign:
            say(f"{node.plane.foreign} placements in NATS are not signed with this cluster's secret", SAME_SECRET)
        if node.plane.problem is not None:
            say(
                f"NATS can't be reached, so frontends do not hear each other's placements: {node.plane.problem}",
                "traffic goes on, each router by what it knows itself; see discovery.nats",
            )
    elif node.plane is not None and node.plane.others.failing:
        count = len(node.plane.others.failing)
        say(f"{count} other frontend{'s' if count > 1 else ''} of this cluster refuse our secret", SAME_SECRET)
    strangers = counts.get("plane_stranger", 0)
    if strangers:
        say(f"{strangers} tries to hear this frontend's placements without the cluster's secret", SAME_SECRET)
    refused = node.feeds.refused
    if refused:
        names = ", ".join(str(target) for target in refused)
        say(f"KV events of {names} can't be heard: another cluster secret", SAME_SECRET)
    newer = sum(counts.get(name, 0) for name in ("store_entry_newer", "plane_message_newer", "peer_message_newer"))
    if newer:
        say(f"{newer} messages of a newer release were refused", SAME_RELEASE)
    return findings
