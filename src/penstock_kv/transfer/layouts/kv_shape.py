"""`KvShape`: what the KV of a model looks like wherever it lies, and which of its heads a tensor-parallel rank has."""

import hashlib
from typing import Final

import msgspec

from penstock.kernel.errors import ConfigError

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
_VERSION = 1


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one block, over all ranks. Two agents exchange KV only where it is the same.

    Args:
        model: name and revision, so that equal shapes of two models don't mix.
        page_tokens: tokens of a block.
        outer: 2 for keys and values, 1 for the joint latent of MLA.
        heads: KV heads of the model; 1 for MLA.
        head_dim: values per head and token.
        dtype: one of `DTYPE_BYTES`.
    """

    model: str
    layers: int
    page_tokens: int
    heads: int
    head_dim: int
    dtype: str
    outer: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "page_tokens", "heads", "head_dim", "outer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a KV shape is {getattr(self, name)}", hint="it is at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {self.dtype!r} of a KV shape is unknown", hint=f"one of {', '.join(DTYPE_BYTES)}")

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one head of one token."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """Return the layout digest, 32 hexadecimal digits: BLAKE2b-128 of version and fields."""
        encoded = msgspec.msgpack.encode((_VERSION, msgspec.structs.astuple(self)))
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()

    def differences(self, other: "KvShape") -> list[str]:
        """Return the fields that differ, with both values."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return [f"{name} {ours!r} here, {theirs!r} there" for name, ours, theirs in pairs if ours != theirs]

    def heads_of(self, rank: int, size: int) -> range:
        """Return the heads that a rank of ``size`` ranks has.

        More ranks than heads replicate them: size / heads neighbours have the same head, as with GQA and MLA.
        """
        if not 0 <= rank < size:
            raise ConfigError(f"tensor-parallel rank {rank} is not within its {size} ranks")
        if self.heads % size and size % self.heads:
            raise ConfigError(
                f"{self.heads} KV heads can't be split over {size} tensor-parallel ranks",
                hint="one of the two numbers divides the other",
            )
        first = rank * self.heads // size
        return range(first, first + max(1, self.heads // size))
