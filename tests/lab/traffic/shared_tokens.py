"""Prompt tokens that two requests of a trace share."""

from collections.abc import Sequence

from penstock_lab.traffic.traffic_request import TrafficRequest


def shared_tokens(one: TrafficRequest, other: TrafficRequest) -> int:
    """Count the leading prompt tokens that two requests share.

    Raises:
        ValueError: a prompt is text, whose tokens only a tokenizer knows, or the two are given in different ways.
    """
    if one.token_ids is not None and other.token_ids is not None:
        return _agree(one.token_ids, other.token_ids)
    if not one.hash_ids or not other.hash_ids or one.block_size != other.block_size:
        raise ValueError("shared tokens are known only between two token prompts or two with hash ids of one size")
    return min(_agree(one.hash_ids, other.hash_ids) * one.block_size, one.isl, other.isl)


def _agree(one: Sequence[int], other: Sequence[int]) -> int:
    for depth, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return depth
    return min(len(one), len(other))
