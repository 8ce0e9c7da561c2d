"""`AgentMetadata`: what an agent tells its peers: name, epoch, KV shape, regions, and a part for each backend."""

import msgspec

from penstock.kernel.message_version import VersionedDecoder
from penstock_kv.transfer.descriptors import RegionInfo
from penstock_kv.transfer.layouts.kv_shape import KvShape
from penstock_kv.transfer.transfer_status import TransferRefused, TransferStatus, decode_message


class AgentMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Serialised by `encode`; an agent with ``shape`` takes a peer with another one for a misconfiguration.

    Args:
        digest: of ``shape``; empty without one.
        parts: backend's name -> what a peer's backend of that name needs.
    """

    version: int = 1
    name: str
    epoch: int
    digest: str
    shape: KvShape | None
    regions: list[RegionInfo]
    parts: dict[str, bytes]

    def encode(self) -> bytes:
        """Return the metadata as MessagePack."""
        return msgspec.msgpack.encode(self)


_DECODER = VersionedDecoder(AgentMetadata, "the metadata of a transfer agent", binary=True)


def decode_metadata(data: bytes) -> AgentMetadata:
    """Read metadata of a peer.

    Raises:
        TransferRefused: it is damaged, of a newer version, or contradicts itself.
    """
    metadata: AgentMetadata = decode_message(_DECODER, data, "the metadata of a peer")
    if metadata.digest != ("" if metadata.shape is None else metadata.shape.digest):
        raise TransferRefused(
            TransferStatus.MISMATCH, f"the layout digest of {metadata.name!r} is not that of its shape"
        )
    return metadata


def check_shapes(ours: KvShape | None, metadata: AgentMetadata) -> None:
    """Check that a peer's blocks have our shape, where both sides name one.

    Raises:
        TransferRefused: MISMATCH, with each field that differs.
    """
    if ours is None or metadata.shape is None or ours.digest == metadata.digest:
        return
    raise TransferRefused(
        TransferStatus.MISMATCH,
        f"the KV blocks of {metadata.name!r} have another layout: {'; '.join(ours.differences(metadata.shape))}",
        hint="start both engines with the same model, block size and KV dtype; tensor-parallel sizes may differ",
    )
