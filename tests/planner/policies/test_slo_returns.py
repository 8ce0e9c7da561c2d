"""Tests for how long a worker that is not needed is kept: what would have cost least over the returns seen."""

import random

import msgspec

from penstock.planner.policies.slo_returns import LONGEST, NEVER, ReturnTimes

TICK, LEAD = 5.0, 120.0


def taught(
    quiet: float, busy: float, harm: float, *, times: int = 6, foreseen: bool = False
) -> tuple[ReturnTimes, float]:
    """Let one worker be enough for ``quiet`` seconds and two be needed for ``busy``, in turns; return how it ended.

    Args:
        harm: GPUs that the lack of the second one costs while it is needed.
        foreseen: whether the forecast sees the need a start-up time ahead.
    """
    returns, at = ReturnTimes(), 0.0
    period = quiet + busy
    while at < times * period:
        now = 2 if at % period >= quiet else 1
        ahead = 2 if (at + LEAD) % period >= quiet else 1
        order = ahead if foreseen else now
        returns.look(at, used=now, now=now, order=order, needed=max(now, order), lead=LEAD, harm=lambda size: harm)
        at += TICK
    return returns, at


def test_bursts_that_nobody_foresees_teach_to_stay() -> None:
    returns, at = taught(200.0, 60.0, harm=10.0)
    assert 190.0 <= returns.patience(2, LEAD, gpus=1) <= 220.0
    assert returns.worth_keeping(at + 100.0, 2, 60.0, LEAD, 1)[0] == 2
    assert returns.worth_keeping(at + 400.0, 2, 60.0, LEAD, 1)[0] < 2


def test_a_need_that_is_foreseen_costs_only_its_start() -> None:
    returns, _ = taught(600.0, 600.0, harm=10.0, foreseen=True)
    assert returns.patience(2, LEAD, gpus=1) == 0.0


def test_a_worker_that_is_dear_or_hardly_missed_goes_at_once() -> None:
    assert taught(900.0, 60.0, harm=10.0)[0].patience(2, LEAD, gpus=8) == 0.0
    assert taught(900.0, 60.0, harm=0.1)[0].patience(2, LEAD, gpus=1) == 0.0


def test_whoever_was_never_seen_to_come_back_is_kept_for_as_long_as_a_start_takes() -> None:
    """That is what it would cost to start it again: nobody pays more than twice what was needed."""
    returns = ReturnTimes()
    returns.look(0.0, used=2, now=2, order=2, needed=2, lead=LEAD, harm=lambda size: 10.0)
    for at in (5.0, LEAD - 5.0):
        returns.look(at, used=1, now=1, order=1, needed=1, lead=LEAD, harm=lambda size: 10.0)
        assert returns.worth_keeping(at, 2, 60.0, LEAD, 1)[0] == 2
    assert returns.worth_keeping(LEAD + 5.0, 2, 60.0, LEAD, 1)[0] < 2


def test_what_was_only_feared_is_kept_for_the_least_time() -> None:
    returns = ReturnTimes()
    returns.look(0.0, used=1, now=1, order=3, needed=3, lead=LEAD, harm=lambda size: 10.0)
    returns.look(5.0, used=1, now=1, order=1, needed=1, lead=LEAD, harm=lambda size: 10.0)
    assert returns.worth_keeping(55.0, 3, 60.0, LEAD, 1)[0] == 3
    assert returns.worth_keeping(65.0, 3, 60.0, LEAD, 1)[0] < 3


def test_nobody_is_kept_for_longer_than_the_longest() -> None:
    returns, _ = taught(LONGEST * 1.5, 60.0, harm=1000.0, times=4)
    assert returns.patience(2, LEAD, gpus=1) == 0.0


def test_it_is_the_patience_that_would_have_cost_least() -> None:
    """Every patience tried on the same returns, priced by hand."""
    dice = random.Random(3)
    returns, at, gaps = ReturnTimes(), 0.0, []
    for _ in range(5):
        gap = TICK * dice.randrange(10, 120)
        gaps.append(gap)
        for second in range(0, int(gap + 200.0), int(TICK)):
            now = 2 if second >= gap else 1
            returns.look(at, used=now, now=now, order=now, needed=now, lead=LEAD, harm=lambda size: 4.0)
            at += TICK
    kept = returns.snapshot()["returns"][2]

    def cost(patience: float) -> float:
        total = NEVER * patience
        for place, (gap, lack) in enumerate(kept):
            weight = 0.85 ** (len(kept) - 1 - place)
            total += weight * (min(gap, patience) + (lack + LEAD if gap > patience else 0.0))
        return total

    best = min(cost(float(patience)) for patience in range(900))
    assert cost(returns.patience(2, LEAD, gpus=1)) <= best + 5.0


def test_what_is_kept_and_read_again_is_the_same() -> None:
    returns, at = taught(200.0, 60.0, harm=10.0)
    again = ReturnTimes()
    again.restore(msgspec.json.decode(msgspec.json.encode(returns.snapshot())))
    assert again.snapshot() == returns.snapshot()
    assert again.worth_keeping(at, 2, 0.0, LEAD, 1) == returns.worth_keeping(at, 2, 0.0, LEAD, 1)
