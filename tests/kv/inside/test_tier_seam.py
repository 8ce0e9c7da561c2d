"""Are the shapes of vLLM's tiering seam known by their names, and is any other one refused?"""

from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType
from typing import Any

import pytest

from penstock.kernel.errors import ConfigError
from penstock_kv.inside.tier_seam import TierSeam


class Lookup(Enum):
    MISS = auto()
    HIT = auto()
    RETRY = auto()


@dataclass
class NewJob:
    job_id: int
    keys: list[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class OldJob:
    job_id: int
    keys: list[bytes]
    block_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class NewResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


@dataclass
class OldResult:
    job_id: int
    success: bool
    other: list[int] = field(default_factory=list)


class Manager:
    def get_finished_jobs(self) -> None: ...


def module(**names: Any) -> ModuleType:
    made = ModuleType("made")
    vars(made).update(names)
    return made


def new() -> TierSeam:
    tiering = module(TransferJob=NewJob, JobResult=NewResult, SecondaryTierManager=Manager)
    return TierSeam(module(LookupResult=Lookup), tiering, "0.32.0")


def old() -> TierSeam:
    return TierSeam(module(), module(JobMetadata=OldJob, JobResult=OldResult, SecondaryTierManager=Manager), "0.29.0")


def test_the_names_of_both_shapes_are_found() -> None:
    assert (new().hit, new().miss, new().retry) == (Lookup.HIT, Lookup.MISS, Lookup.RETRY)
    assert (old().hit, old().miss, old().retry) == (True, False, None)
    assert new().rows(NewJob(1, [b"a"], (3, 4), True, None)) == [3, 4]
    assert old().rows(OldJob(1, [b"a"], [5], True, None)) == [5]


def test_a_job_is_made_smaller() -> None:
    class Rows(list[int]):
        """Takes a list of places, as an array does."""

        def __getitem__(self, places: Any) -> Any:
            return [super(Rows, self).__getitem__(place) for place in places]

    job = NewJob(1, [b"a", b"b", b"c"], Rows([7, 8, 9]), False, "context")
    assert new().part(job, [0, 2]) == NewJob(1, [b"a", b"c"], [7, 9], False, "context")


def test_a_partial_failure_keeps_what_is_right_only_where_results_have_keys() -> None:
    inner = NewResult(7, True, transfer_time=0.5)
    assert new().result(7, [b"a"], [b"b"], inner) == NewResult(7, False, (b"a",), 0.5)
    assert new().result(7, [b"a"], []) == NewResult(7, True)
    assert new().right_keys(NewResult(7, False, (b"b",)), [b"a", b"b"]) == [b"b"]
    assert old().result(7, [b"a"], [b"b"]) == OldResult(7, False)
    assert old().right_keys(OldResult(7, False), [b"a", b"b"]) == []


def test_another_shape_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 9\.9 .*TransferJob\.chunk_ids.*get_finished_jobs.*use vLLM"):
        TierSeam(module(), module(JobResult=NewResult), "9.9")
