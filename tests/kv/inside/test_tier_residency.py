"""Is a block announced as removed once no tier of its medium has it, and not before?"""

from dataclasses import dataclass, field

from penstock_kv.inside.tier_seam import TierResidency


@dataclass
class OneEvent:
    """What vLLM's ``OffloadingEvent`` has."""

    keys: list[bytes] = field(default_factory=list)
    medium: str = "CPU"
    removed: bool = False
    ownership: str | None = None


def stored(*keys: bytes, ownership: str | None = None, medium: str = "CPU") -> OneEvent:
    return OneEvent(list(keys), medium, False, ownership)


def removed(*keys: bytes, ownership: str | None = None, medium: str = "CPU") -> OneEvent:
    return OneEvent(list(keys), medium, True, ownership)


def test_a_block_is_removed_with_its_last_owner() -> None:
    residency = TierResidency()
    first = [stored(b"a", b"b"), stored(b"a", ownership="ours")]
    assert list(residency.merge(first)) == first
    assert list(residency.merge([removed(b"a", b"b")])) == [removed(b"b")]
    assert list(residency.merge([removed(b"a", ownership="ours")])) == [removed(b"a")]


def test_media_are_told_apart() -> None:
    residency = TierResidency()
    list(residency.merge([stored(b"a"), stored(b"a", ownership="disk", medium="STORAGE")]))
    assert list(residency.merge([removed(b"a")])) == [removed(b"a")]


def test_a_clear_leaves_what_others_have() -> None:
    residency = TierResidency()
    list(residency.merge([stored(b"a", b"b"), stored(b"b", ownership="ours")]))
    residency.cleared()
    assert list(residency.merge([stored(b"b"), removed(b"b")])) == [stored(b"b")]


def test_a_removal_of_what_was_never_stored_is_passed_on() -> None:
    assert list(TierResidency().merge([removed(b"a")])) == [removed(b"a")]
