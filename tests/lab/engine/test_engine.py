"""What does the engine do, told one situation at a time?"""

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import MILLISECOND, Wake, Woken
from penstock.kernel.values import KvCleared, KvStored, Prompt
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import (
    AbortRequest,
    ClearCache,
    EngineFinished,
    EngineFirstToken,
    EngineRejected,
    EngineStarted,
    KvChanged,
    SubmitRequest,
)
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.engine.settings import SimSettings, TimingSettings
from tests.lab.engine.driving import Driven

CONSTANT = TimingSettings(prefill=(0.0, 0.0, 10.0), decode=(0.0, 0.0, 5.0))
SMALL = SimSettings(
    block_size=4, kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, timing=CONSTANT
)


def only(effects: object, kind: type) -> object:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]  # type: ignore[attr-defined]
    return found


def test_a_request_is_three_looks_at_the_engine_however_long_its_answer() -> None:
    settings = SimSettings(timing=CONSTANT, emit_decode_blocks=False)
    driven = Driven(settings, [(0, SubmitRequest(id="a", prompt=Prompt(100), max_tokens=10_000))]).run()
    assert driven.simulation.events_handled == 4  # submit, start, first token, end
    assert driven.told == [
        ("started", "a", 0, 0),
        ("first", "a", 10 * MILLISECOND, None),
        ("length", "a", (10 + 9_999 * 5) * MILLISECOND, (10_000, 0)),
    ]


def test_the_time_of_every_token_is_known_beforehand() -> None:
    engine = Engine(SMALL)
    engine.handle(0, SubmitRequest(id="a", prompt=Prompt(3), max_tokens=20))
    effects = engine.handle(0, Woken())
    assert only(effects, Wake) == Wake(at=10 * MILLISECOND)
    assert engine.tokens_at("a", 9 * MILLISECOND) == 0
    assert engine.token_time("a", 1) == 10 * MILLISECOND
    engine.handle(10 * MILLISECOND, Woken())
    assert [engine.token_time("a", i) for i in (1, 2, 3, 20, 21)] == [
        None,  # it is out already
        15 * MILLISECOND,
        20 * MILLISECOND,
        105 * MILLISECOND,
        None,
    ]
    assert engine.tokens_at("a", 26 * MILLISECOND) == 4
    assert engine.next_step(26 * MILLISECOND) == 30 * MILLISECOND
    with pytest.raises(KeyError):
        engine.tokens_at("b", 0)


def test_an_arrival_waits_for_the_end_of_the_step_in_progress() -> None:
    driven = Driven(
        SMALL,
        [
            (0, SubmitRequest(id="a", prompt=Prompt(3), max_tokens=100)),
            (27 * MILLISECOND, SubmitRequest(id="b", prompt=Prompt(3), max_tokens=1)),
        ],
    )
    driven.run()
    assert ("started", "b", 30 * MILLISECOND, 0) in driven.told
    assert ("first", "b", 45 * MILLISECOND, None) in driven.told  # its prefill and a step of a


def test_requests_of_one_moment_share_a_pass() -> None:
    driven = Driven(SMALL, [(0, SubmitRequest(id=str(i), prompt=Prompt(8), max_tokens=1)) for i in range(4)]).run()
    assert [line[2] for line in driven.told if line[0] == "first"] == [10 * MILLISECOND] * 4


def test_a_full_prompt_hit_recomputes_its_last_block() -> None:
    prompt = list(range(16))
    later = 100 * MILLISECOND
    driven = Driven(
        SMALL,
        [
            (0, SubmitRequest(id="a", tokens=prompt, max_tokens=1)),
            (later, SubmitRequest(id="b", tokens=prompt, max_tokens=1)),
        ],
    )
    driven.run()
    assert ("started", "b", later, 12) in driven.told
    assert [change[0] for change in driven.kv] == ["stored"] * 4  # the last block is not told again


def test_stored_blocks_are_told_with_our_hashes_and_their_tokens() -> None:
    engine = Engine(SMALL)
    prompt = list(range(50, 61))
    engine.handle(0, SubmitRequest(id="a", tokens=prompt, max_tokens=9, salt="s"))
    (stored,) = only(engine.handle(0, Woken()), KvChanged).events  # type: ignore[attr-defined]
    assert isinstance(stored, KvStored)
    assert stored.hashes == block_hashes(prompt, 4, salt="s")
    assert stored.tokens == prompt[:8] and stored.block_size == 4 and stored.parent is None
    assert stored.extras is not None and stored.extras[0] and not stored.extras[1]


def test_blocks_of_generated_tokens_are_told_as_they_fill_where_that_is_wanted() -> None:
    prompt = list(range(6))
    driven = Driven(SMALL, [(0, SubmitRequest(id="a", tokens=prompt, max_tokens=8))])
    driven.run()
    engine = Engine(SMALL)
    engine.handle(0, SubmitRequest(id="a", tokens=prompt, max_tokens=8))
    made = engine.answer("a").upto(8)
    want = block_hashes(prompt + made, 4)
    assert [change[1] for change in driven.kv] == want[:3]  # the last token's KV is never computed
    quiet = Driven(
        SimSettings(block_size=4, kv_blocks=64, emit_decode_blocks=False),
        [(0, SubmitRequest(id="a", tokens=prompt, max_tokens=8))],
    )
    assert [change[1] for change in quiet.run().kv] == want[:1]


def test_what_can_never_run_is_rejected_with_the_reason() -> None:
    engine = Engine(SMALL)
    for number, submit in enumerate(
        [
            SubmitRequest(id="a", prompt=Prompt(0), max_tokens=1),
            SubmitRequest(id="b", prompt=Prompt(5), max_tokens=0),
            SubmitRequest(id="c", prompt=Prompt(150), max_tokens=51),
        ]
    ):
        rejected = only(engine.handle(number, submit), EngineRejected)
        assert rejected.id == submit.id and rejected.at == number  # type: ignore[attr-defined]
    tight = Engine(SimSettings(block_size=4, kv_blocks=4, max_num_seqs=1))
    assert (
        "5 blocks exceed the 4"
        in only(tight.handle(0, SubmitRequest(id="d", prompt=Prompt(10), max_tokens=8)), EngineRejected).why
    )  # type: ignore[attr-defined]
    engine.handle(9, SubmitRequest(id="e", prompt=Prompt(5), max_tokens=5))
    assert (
        "runs already"
        in only(engine.handle(9, SubmitRequest(id="e", prompt=Prompt(5), max_tokens=5)), EngineRejected).why
    )  # type: ignore[attr-defined]
    assert engine.counters(9).rejected == 4


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    settings = SimSettings(
        block_size=1,
        kv_blocks=20,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        timing=CONSTANT,
    )
    events = [
        (0, SubmitRequest(id="a", prompt=Prompt(6), max_tokens=14)),
        (0, SubmitRequest(id="b", prompt=Prompt(6), max_tokens=14)),
        (1, SubmitRequest(id="c", prompt=Prompt(6), max_tokens=2)),
    ]
    driven = Driven(settings, events).run()
    ends = {line[1]: line[2] for line in driven.told if line[0] == "length"}
    assert ends["a"] < ends["b"]
    assert driven.engine.counters(driven.simulation.now).preemptions >= 1


def test_an_abort_frees_blocks_at_once_and_says_how_far_it_came() -> None:
    engine = Engine(SMALL)
    engine.handle(0, SubmitRequest(id="a", prompt=Prompt(30), max_tokens=50))
    engine.handle(0, Woken())
    engine.handle(10 * MILLISECOND, Woken())
    assert engine.kv_usage > 0
    done = only(engine.handle(31 * MILLISECOND, AbortRequest(id="a")), EngineFinished)
    assert (done.reason, done.tokens, done.at) == ("abort", 5, 31 * MILLISECOND)  # type: ignore[attr-defined]
    assert engine.kv_usage == 0.0
    assert engine.handle(32 * MILLISECOND, AbortRequest(id="a")) == []


def test_clearing_keeps_what_is_in_use() -> None:
    engine = Engine(SMALL)
    engine.handle(0, SubmitRequest(id="a", tokens=[1] * 9, max_tokens=50))
    engine.handle(0, Woken())
    assert engine.handle(1, ClearCache()) == []
    engine.handle(2, AbortRequest(id="a"))
    assert only(engine.handle(3, ClearCache()), KvChanged).events == [KvCleared()]  # type: ignore[attr-defined]
    assert engine.cached_blocks == 0


def test_a_late_driver_gets_the_exact_times_all_the_same() -> None:
    engine = Engine(SMALL)
    engine.handle(0, SubmitRequest(id="a", prompt=Prompt(3), max_tokens=3))
    effects = engine.handle(999 * MILLISECOND, Woken())
    told = [(type(e), e.at) for e in effects if isinstance(e, EngineStarted | EngineFirstToken | EngineFinished)]
    assert told == [(EngineStarted, 0), (EngineFirstToken, 10 * MILLISECOND), (EngineFinished, 20 * MILLISECOND)]


def test_forced_answers_end_with_their_last_token() -> None:
    driven = Driven(SMALL, [(0, SubmitRequest(id="a", prompt=Prompt(3), max_tokens=50, output=[7, 8, 9]))]).run()
    assert driven.told[-1][0] == "stop" and driven.told[-1][3] == (3, 0)
    driven = Driven(SMALL, [(0, SubmitRequest(id="a", prompt=Prompt(3), max_tokens=2, output=[7, 8, 9]))]).run()
    assert driven.told[-1][0] == "length" and driven.told[-1][3] == (2, 0)


def test_speculation_shortens_answers_by_its_accept_rate() -> None:
    def ends(drafts: int, rate: float) -> int:
        settings = SimSettings(num_speculative_tokens=drafts, accept_rate=rate, timing=CONSTANT)
        driven = Driven(settings, [(0, SubmitRequest(id="a", prompt=Prompt(10), max_tokens=401))]).run()
        return driven.told[-1][2] // MILLISECOND

    assert ends(0, 0.0) == ends(3, 0.0) == 10 + 400 * 5
    assert ends(3, 1.0) == 10 + 100 * 5
    mean = 1 + 0.5 + 0.25 + 0.125
    assert ends(3, 0.5) == pytest.approx(10 + 400 / mean * 5, rel=0.15)


def test_knobs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Engine(SimSettings(max_num_seqs=100, max_num_batched_tokens=50))
    with pytest.raises(ConfigError, match="table"):
        Engine(SimSettings(timing=TimingSettings(kind="table")))


def test_the_benchmark_of_an_engine_whose_memory_exceeds_its_longest_request() -> None:
    # Batches of prompts near max_model_len must leave room for the tokens that the first ones make meanwhile.
    found = perf_metrics(SimSettings(kv_blocks=20_000, max_num_seqs=128, max_model_len=32_768))
    assert {point["batch"] for point in found["decode"]} == {1, 16, 64}
    assert all(point["seconds"] > 0.0 for point in found["decode"])


def test_asynchronous_scheduling_plans_a_pass_ahead() -> None:
    """Who arrives, or ends, during a pass counts in the pass after the next: the next one is planned already."""

    def told(ahead: bool, max_num_seqs: int) -> dict[str, int]:
        settings = msgspec.structs.replace(SMALL, max_num_seqs=max_num_seqs, async_scheduling=ahead)
        events = [
            (0, SubmitRequest(id="a", prompt=Prompt(3), max_tokens=6)),
            (17 * MILLISECOND, SubmitRequest(id="b", prompt=Prompt(3), max_tokens=1)),
        ]
        return {line[1]: line[2] for line in Driven(settings, events).run().told if line[0] == "first"}

    assert told(False, 2) == {"a": 10 * MILLISECOND, "b": (20 + 15) * MILLISECOND}
    assert told(True, 2) == {"a": 10 * MILLISECOND, "b": (25 + 15) * MILLISECOND}
    # One at a time: the other's place is free when it has ended, and nothing else could be planned ahead.
    assert told(False, 1) == told(True, 1) == {"a": 10 * MILLISECOND, "b": (35 + 10) * MILLISECOND}
