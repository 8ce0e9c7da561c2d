"""GPU allocation: gives each GPU of a machine to at most one engine."""

from collections.abc import Sequence

import msgspec

SHOWN_MAX = 16
"""GPUs that are listed one by one."""


class GpuAllocator(msgspec.Struct, kw_only=True):
    """Indices of GPUs, and which of them no engine has. ``source``: what lists them."""

    all: tuple[int, ...] = ()
    source: str = "none"
    left: list[int] = []

    @classmethod
    def over(cls, gpus: Sequence[int], source: str) -> "GpuAllocator":
        """Return an allocator whose GPUs are all free."""
        return cls(all=tuple(gpus), source=source, left=list(gpus))

    @property
    def free(self) -> int:
        return len(self.left)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take the lowest free GPUs, or return None where there are too few."""
        if count > len(self.left):
            return None
        taken, self.left = tuple(self.left[:count]), self.left[count:]
        return taken

    def claim(self, gpus: Sequence[int]) -> bool:
        """Take the GPUs of an adopted engine; return False where one of them is not free."""
        if not set(gpus) <= set(self.left):
            return False
        self.left = [gpu for gpu in self.left if gpu not in gpus]
        return True

    def give(self, gpus: Sequence[int]) -> None:
        """Give some GPUs back."""
        self.left = [gpu for gpu in self.all if gpu in self.left or gpu in gpus]

    def __str__(self) -> str:
        shown = f"{len(self.all)} of them" if len(self.all) > SHOWN_MAX else ", ".join(map(str, self.all))
        return f"{shown or 'none'} ({self.source})"
