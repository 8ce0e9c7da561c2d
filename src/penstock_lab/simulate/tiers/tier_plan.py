"""`TierPlan`: the tiers below each simulated engine of a pool, as plain values."""

import msgspec

from penstock_kv.blocks.block_manager import OrderName
from penstock_kv.blocks.tiers.tier_settings import OffloadPolicy, WritePolicy


class TierPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tiers of one engine, in bytes; without host memory there are none.

    Args:
        host, disk: bytes of host memory and of disk.
        store: an object store below them.
        peers: fetch blocks from the host memory of the plan's other engines, too.
        order, offload, write: as `penstock_kv.blocks.tiers.tier_settings.TierSettings` has them.
    """

    host: int = 0
    disk: int = 0
    store: bool = False
    peers: bool = False
    order: OrderName = "priority"
    offload: OffloadPolicy = "all"
    write: WritePolicy = "through"
