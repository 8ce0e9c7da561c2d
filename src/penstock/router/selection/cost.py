"""Cost of placing a request on a worker: two cost functions over one record of terms.

``blocks`` is the formula of Dynamo's default worker selection, in blocks:

    prefill = scale * max((queued prefill tokens + isl) / block_size - credit, 0)
    credit  = c * device + host_credit * host + disk_credit * disk        (overlap in blocks)
    c       = overlap_credit / (1 + CREDIT_DECAY * excess)
    excess  = max(queued prefill tokens - the least over all candidates, 0) / block_size / request blocks
    total   = prefill + decode_scale * (blocks in use after adding + request_weight * requests) + transfer

``transfer`` is there where another worker holds the prompt's KV, and none of it is computed here: transfer_scale *
distance for each of its blocks that this worker does not hold.

Blocks on a worker's host memory and disk count where the worker's own tiers would load them, by the costs that it
reports (`penstock.router.kv_index.tier_costs`); without a report all count.

``adapter`` is there where a LoRA adapter would have to be loaded first: the prefill that could be done in that time.

``latency`` predicts milliseconds: this request's own prefill, the prefill queued before it, bringing blocks from
lower tiers, and what the worker's KV in use adds to its decode steps over the expected output.
"""

from collections.abc import Callable

from penstock.router.events import Cost
from penstock.router.kv_index.indexer import NOTHING, HeldBlocks
from penstock.router.selection.candidate import Candidate, RequestDemand
from penstock.router.settings import CostSettings

CREDIT_DECAY = 0.0
"""How fast the credit fades on a worker with more queued prefill than the least; Dynamo's default."""
TRANSFER_MS_PER_BLOCK = 0.05
"""What bringing a block from host, disk or a prefill worker takes, until hand-offs have been measured."""

PREFILL_TOKENS_PER_SECOND = 20_000.0
"""Prefill speed that is assumed until it has been measured; the tokens that a second of waiting for an adapter is worth
in blocks."""


CostFunction = Callable[[RequestDemand, Candidate, CostSettings], Cost]


def block_cost(demand: RequestDemand, candidate: Candidate, settings: CostSettings) -> Cost:
    """Dynamo's formula, in blocks. Cost: some 3 us; it is worked out for every candidate of every request."""
    load, overlap, size, prompt = candidate.load, candidate.overlap, demand.block_size, demand.prompt
    isl, blocks = prompt.isl, prompt.blocks
    transfer = 0.0
    if demand.handed:
        transfer = settings.transfer_scale * candidate.distance * _missing(demand, overlap)
        isl, overlap = 0, NOTHING  # no cached block saves any prefill here
    queued, device = load.prefill_tokens, overlap.device
    excess = (queued - demand.least_prefill) / size / (len(blocks) + demand.unhashed_blocks or 1)
    credit = demand.overlap_credit / (1.0 + CREDIT_DECAY * (excess if excess > 0.0 else 0.0)) * device
    lower = settings.host_credit * overlap.host + settings.disk_credit * overlap.disk
    # Credit saves this request's prefill first; a credit above 1 may eat into what is queued, never below zero.
    queue = queued / size
    work = queue + isl / size - credit - lower
    if work < 0.0:
        work = 0.0
    own = work - queue
    if own < 0.0:
        own = 0.0
    decode = settings.decode_scale * (
        load.blocks_with(blocks, demand.unhashed_blocks) + settings.request_weight * load.requests
    )
    scale = settings.prefill_scale
    adapter = scale * PREFILL_TOKENS_PER_SECOND * candidate.adapter / size
    return Cost(
        target=candidate.target,
        unit="blocks",
        total=scale * work + decode + transfer + adapter,
        prefill=scale * own,
        decode=decode,
        queue=scale * (work - own),
        transfer=transfer,
        overlap_blocks=candidate.overlap.device,
        overlap_tokens=cached_tokens(demand, candidate.overlap),
        costly_blocks=candidate.overlap.costly,
        active_requests=load.requests,
        active_prefill_tokens=queued,
        active_blocks=load.blocks,
        adapter=adapter,
        index=overlap.source,
    )


def latency_cost(demand: RequestDemand, candidate: Candidate, settings: CostSettings) -> Cost:
    """Predicted milliseconds until the first token, and slow-down of the tokens after it."""
    load, overlap, speed = candidate.load, candidate.overlap, candidate.speed
    cached = cached_tokens(demand, overlap)
    new = 0 if demand.handed else demand.prompt.isl - cached
    prefill = 1e3 * (speed.prefill_intercept + speed.prefill_slope * new)
    queue = 1e3 * speed.prefill_slope * load.prefill_tokens
    transfer = TRANSFER_MS_PER_BLOCK * overlap.lower
    if demand.handed:
        transfer = demand.ms_per_block * candidate.distance * _missing(demand, overlap)
    used = load.blocks_with(demand.prompt.blocks, demand.unhashed_blocks)
    decode = 1e3 * speed.decode_slope * used * demand.osl
    adapter = 1e3 * candidate.adapter
    return Cost(
        target=candidate.target,
        unit="ms",
        total=prefill + queue + transfer + decode + adapter,
        prefill=prefill,
        decode=decode,
        queue=queue,
        transfer=transfer,
        overlap_blocks=overlap.device,
        overlap_tokens=cached,
        costly_blocks=overlap.costly,
        active_requests=load.requests,
        active_prefill_tokens=load.prefill_tokens,
        active_blocks=load.blocks,
        adapter=adapter,
        index=overlap.source,
    )


COSTS: dict[str, CostFunction] = {"blocks": block_cost, "latency": latency_cost}


def _missing(demand: RequestDemand, overlap: HeldBlocks) -> int:
    """Return how many of a prompt's blocks a worker does not hold on its device."""
    return max(0, len(demand.prompt.blocks) + demand.unhashed_blocks - overlap.device)


def cached_tokens(demand: RequestDemand, overlap: HeldBlocks) -> int:
    """Return the prompt tokens that are expected to come from a target's cache, all tiers."""
    blocks = overlap.device + overlap.host + overlap.disk  # no call on the hot path
    if not blocks:
        return 0
    # An engine computes at least the last token of a prompt that it holds in full, and does so by the block.
    size = demand.block_size
    return min(blocks * size, max(0, demand.prompt.isl - 1) // size * size)
