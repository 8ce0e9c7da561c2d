"""Whole lists of effects are compared, and what differs is named."""

import pytest

from penstock.fleet.events import Spawn, Stop
from penstock.kernel.machine import Effect, Wake
from penstock.testing import like, none, only

EFFECTS: list[Effect] = [Spawn(worker="a", serial=1, pool="p", number=0), Wake(at=5)]


def test_a_list_equals_its_patterns_and_no_shorter_or_other_one() -> None:
    assert [like(Spawn, worker="a"), like(Wake)] == EFFECTS
    assert [like(Spawn, worker="a")] != EFFECTS
    assert [like(Spawn, worker="b"), like(Wake)] != EFFECTS
    assert [like(Stop), like(Wake)] != EFFECTS
    assert repr(like(Spawn, worker="a")) == "like(Spawn, worker='a')"


def test_a_field_that_no_such_effect_has_is_a_mistake_of_the_test() -> None:
    with pytest.raises(TypeError, match="Spawn has no wroker"):
        like(Spawn, wroker="a")


def test_one_is_picked_out() -> None:
    assert only(EFFECTS, Wake).at == 5
    assert none(EFFECTS, Stop)
    with pytest.raises(AssertionError, match="0 of Stop"):
        only(EFFECTS, Stop)
