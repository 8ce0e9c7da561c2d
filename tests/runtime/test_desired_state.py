"""Is a record of the store read as what it is, and a kind that is none named?"""

import msgspec
import pytest

from penstock.kernel.errors import InvariantError
from penstock.runtime.cluster_state.desired_state import DrainSpec, PoolSpec, decode, decode_all


class Unheard(msgspec.Struct):
    """No kind of record."""


def test_a_record_is_read_and_what_can_not_be_read_is_left_out() -> None:
    spec = PoolSpec(replicas=3, by="test")
    assert decode(PoolSpec, msgspec.json.encode(spec)) == spec
    assert decode(DrainSpec, b"[]") is None
    raw = {"desired/a": msgspec.json.encode(spec), "desired/b": b"{"}
    assert decode_all(PoolSpec, raw, "desired/") == {"a": spec}


def test_an_unknown_kind_is_named_beside_those_that_are_known() -> None:
    with pytest.raises(InvariantError, match=r"kind is Unheard.*known kinds are AdapterSpec, .*PoolSpec") as error:
        decode(Unheard, b"{}")
    assert error.value.hint is not None and "desired_state.py" in error.value.hint
