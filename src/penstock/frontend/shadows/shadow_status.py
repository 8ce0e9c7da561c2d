"""`ShadowStatus`: how many copies of a name's requests came to the same answer at another model."""

import msgspec


class ShadowStatus(msgspec.Struct, kw_only=True):
    """Copies of one name's requests to one model. ``seconds``, ``answered_seconds``: means of the compared answers."""

    model: str
    share: float
    same: int = 0
    different: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float | None = None
    answered_seconds: float | None = None

    def join(self, other: "ShadowStatus") -> None:
        """Add another process's counts."""
        for field in ("seconds", "answered_seconds"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine is None or theirs is None:
                setattr(self, field, theirs if mine is None else mine)
            else:
                here, there = self.compared, other.compared
                setattr(self, field, (mine * here + theirs * there) / max(1, here + there))
        for field in ("same", "different", "failed", "skipped"):
            setattr(self, field, getattr(self, field) + getattr(other, field))

    @property
    def compared(self) -> int:
        return self.same + self.different
