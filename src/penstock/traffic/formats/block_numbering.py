"""Numbers the hash ids of a trace's blocks from 0, and gives blocks without an id one of their own."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from penstock.traffic.traffic_request import TrafficRequest


def numbered(requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
    """Number blocks 0, 1, 2, ... in the order in which they first appear, as the Mooncake traces do.

    Prompts share what they shared before. Blocks that a request has no id for, all of them in traces that know only
    lengths, get numbers that no other block has: from here on every prompt can be made into tokens.

    Raises:
        ValueError: a prompt is given as text or as tokens, not by hash ids.
    Cost: one entry of a dict per id that was given.
    """
    numbers: dict[tuple[int, int], int] = {}
    following = 0
    for request in requests:
        if request.messages is not None or request.token_ids is not None:
            raise ValueError("blocks are numbered where a prompt is given by hash ids, not as text or tokens")
        size = request.block_size
        ids: list[int] = []
        for value in request.hash_ids:
            number = numbers.get((size, value))
            if number is None:
                numbers[size, value] = number = following
                following += 1
            ids.append(number)
        missing = -(-request.isl // size) - len(ids)
        if missing > 0:
            ids += range(following, following + missing)
            following += missing
        yield replace(request, hash_ids=ids)
