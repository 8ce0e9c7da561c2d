"""`PeerFinder`: which other worker's host tier has blocks that no tier here has."""

from collections.abc import Sequence

from penstock.blocks.block_key import BlockKey
from penstock.blocks.tiers.tier_events import AskPeer, BlocksAsked, PeerAnswered, PrefetchWanted
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.blocks.tiers.tier_settings import (
    PEER_DEADLINE,
    PEER_MEMORY,
    PEER_MEMORY_BLOCKS,
    PEER_QUERIES,
    PEERS_ASKED,
    REST,
)
from penstock.blocks.tiers.tier_state import PeerBlock, PeerQuery
from penstock.kernel.machine import Nanos


class PeerFinder:
    """Asks the nearest peers at once; the one that has most leading blocks is remembered as their source.

    An answer is remembered for a short time, also that nobody has a block: engines ask again while a request waits.
    """

    def __init__(self, moves: TierMoves) -> None:
        self._moves = moves

    def ask(self, now: Nanos, event: BlocksAsked | PrefetchWanted, depth: int) -> bool:
        """Ask for the blocks from ``depth`` on; False where that is of no use: the event can be handled at once."""
        state = self._moves.state
        if not state.peers or depth == len(event.keys) or len(state.queries) >= PEER_QUERIES:
            return False
        keys = event.keys[depth:]
        known = state.peer_blocks.get(keys[0])
        if known is not None and known.until > now:
            return False
        peers = [peer for peer in state.peers if not self._moves.edge("peer", "host", peer)[1].rests(now)][:PEERS_ASKED]
        if not peers or not self._pays(now, peers[0], len(keys)):
            return False
        query = PeerQuery(event=event, keys=keys, deadline=now + PEER_DEADLINE)
        query_id = self._moves.new_id()
        state.queries[query_id] = query
        for peer in peers:
            id = self._moves.new_id()
            query.asks[id] = peer
            state.peer_asks[id] = query_id
            self._moves.effects.append(AskPeer(id=id, peer=peer, keys=keys))
        self._moves.timer(query.deadline, "query", query_id)
        return True

    def answered(self, now: Nanos, event: PeerAnswered) -> PeerQuery | None:
        """Take an answer; returns the query where it was the last one, or has all."""
        state = self._moves.state
        query_id = state.peer_asks.pop(event.id, None)
        if query_id is None:
            state.counts.unknown += 1
            return None
        query = state.queries[query_id]
        peer = query.asks.pop(event.id)
        blocks = min(event.blocks, len(query.keys))
        if blocks > query.blocks:
            query.blocks, query.peer = blocks, peer
        return self._closed(now, query_id, query) if not query.asks or query.blocks == len(query.keys) else None

    def late(self, now: Nanos, query_id: int) -> PeerQuery:
        """Close a query whose deadline has passed; peers that did not answer are left alone for a while."""
        query = self._moves.state.queries[query_id]
        for peer in query.asks.values():
            self._moves.edge("peer", "host", peer)[1].rest_until = now + REST
            self._moves.state.tiers["peer"].late += 1
        return self._closed(now, query_id, query)

    def changed(self, peers: Sequence[str]) -> None:
        """Know these peers and no others."""
        state = self._moves.state
        state.peers = list(peers)
        for key in [key for key, block in state.peer_blocks.items() if block.peer and block.peer not in peers]:
            del state.peer_blocks[key]
        for name, edge in list(state.edges.items()):
            if edge.peer and edge.peer not in peers and not edge.in_flight and not edge.queue and not edge.ahead:
                del state.edges[name]

    def _pays(self, now: Nanos, peer: str, blocks: int) -> bool:
        """Return whether asking could pay, if the peer had all."""
        settings, per_token = self._moves.settings, self._moves.state.seconds_per_token
        edge = self._moves.edge("peer", "host", peer)[1]
        computing = blocks * settings.block_tokens * per_token
        return not per_token or computing > edge.seconds(now, blocks * settings.block_bytes)

    def _closed(self, now: Nanos, query_id: int, query: PeerQuery) -> PeerQuery:
        state = self._moves.state
        del state.queries[query_id]
        for id in query.asks:
            del state.peer_asks[id]
        until = now + PEER_MEMORY
        for key in query.keys[: query.blocks]:
            self._remember(key, PeerBlock(query.peer, until))
        if query.blocks < len(query.keys):
            self._remember(query.keys[query.blocks], PeerBlock("", until))
        return query

    def _remember(self, key: BlockKey, block: PeerBlock) -> None:
        memory = self._moves.state.peer_blocks
        memory.pop(key, None)
        memory[key] = block
        if len(memory) > PEER_MEMORY_BLOCKS:
            del memory[next(iter(memory))]
