"""What does the engine do where another one goes on with a request, told one situation at a time?"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import MILLISECOND, SECOND, Event, Wake, Woken, nanos
from penstock.kernel.values import Prompt, plain
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import (
    AbortRequest,
    EngineFinished,
    EngineFirstToken,
    EngineRejected,
    KvChanged,
    KvPulled,
    PullKv,
    ReleaseKv,
    SubmitRequest,
)
from penstock_lab.engine.settings import SimSettings, TransferSettings
from penstock_lab.runs.block_runs import chain_of
from tests.depth import deep
from tests.lab.engine.driving import Driven
from tests.lab.engine.test_engine import SMALL, only
from tests.lab.engine.test_engine_equals_oracle import TABLE, small_engines

PROMPT = list(range(14))
MISSING = msgspec.structs.replace(SMALL, transfer=TransferSettings(pull="missing"))


def prefilled(engine: Engine, prompt: list[int] = PROMPT, **more: object) -> EngineFinished:
    """Let an idle engine prefill a prompt for another one."""
    engine.handle(0, SubmitRequest(id="p", tokens=prompt, max_tokens=50, hold=True, **more))
    engine.handle(0, Woken())
    done = only(engine.handle(10 * MILLISECOND, Woken()), EngineFinished)
    assert isinstance(done, EngineFinished)
    return done


def pulling(engine: Engine, id: str = "d", now: int = 0, **more: object) -> list:
    """Hand a request in whose prompt another engine computed; returns what it tells."""
    engine.handle(now, SubmitRequest(id=id, tokens=PROMPT, max_tokens=5, remote=len(PROMPT), **more))
    return list(engine.handle(now, Woken()))


def test_a_prefill_for_another_engine_ends_at_its_first_token_and_keeps_its_blocks() -> None:
    engine = Engine(SMALL)
    done = prefilled(engine)
    assert (done.reason, done.tokens, done.blocks_retained) == ("length", 1, 4)
    assert engine.blocks_retained == 4 and engine.kv_usage == 4 / 64 and engine.running == 0
    engine.check()
    engine.handle(11 * MILLISECOND, ReleaseKv(id="p"))
    assert engine.blocks_retained == 0 and engine.kv_usage == 0.0 and engine.cached_blocks == 3
    engine.handle(12 * MILLISECOND, ReleaseKv(id="p"))  # nobody knows it any more
    engine.check()
    engine.handle(13 * MILLISECOND, SubmitRequest(id="again", tokens=PROMPT, max_tokens=1))
    assert ("cached", 12) in [("cached", getattr(e, "cached", None)) for e in engine.handle(13 * MILLISECOND, Woken())]


def test_an_answer_that_is_over_with_its_first_token_holds_nothing() -> None:
    done = prefilled(Engine(SMALL), output=[7])
    assert (done.reason, done.tokens, done.blocks_retained) == ("stop", 1, 0)


def test_a_prefill_that_is_aborted_holds_nothing() -> None:
    engine = Engine(SMALL)
    engine.handle(0, SubmitRequest(id="p", tokens=PROMPT, max_tokens=1, hold=True))
    engine.handle(0, Woken())
    done = only(engine.handle(1, AbortRequest(id="p")), EngineFinished)
    assert (done.reason, done.blocks_retained) == ("abort", 0)  # type: ignore[attr-defined]
    assert engine.kv_usage == 0.0 and engine.blocks_retained == 0


def test_a_held_request_s_id_is_taken() -> None:
    engine = Engine(SMALL)
    prefilled(engine)
    assert (
        "runs already"
        in only(engine.handle(SECOND, SubmitRequest(id="p", prompt=Prompt(3), max_tokens=1)), EngineRejected).why
    )  # type: ignore[attr-defined]


def test_held_blocks_go_by_themselves_when_nobody_takes_them() -> None:
    engine = Engine(msgspec.structs.replace(SMALL, transfer=TransferSettings(hold_timeout=2.0)))
    engine.handle(0, SubmitRequest(id="p", tokens=PROMPT, max_tokens=1, hold=True))
    engine.handle(0, Woken())
    over = 10 * MILLISECOND + 2 * SECOND
    assert only(engine.handle(10 * MILLISECOND, Woken()), Wake) == Wake(at=over)
    assert engine.handle(over, Woken()) == [] or engine.blocks_retained == 0
    assert engine.blocks_retained == 0 and engine.counters(over).hold_expired == 1


def test_who_waits_for_held_blocks_runs_when_they_go() -> None:
    tight = SimSettings(block_size=4, kv_blocks=6, max_num_seqs=2, max_num_batched_tokens=64, timing=SMALL.timing)
    events: list[tuple[int, Event]] = [
        (0, SubmitRequest(id="p", tokens=PROMPT, max_tokens=1, hold=True)),
        (20 * MILLISECOND, SubmitRequest(id="q", prompt=Prompt(12), max_tokens=2)),
        (70 * MILLISECOND, ReleaseKv(id="p")),
    ]
    driven = Driven(tight, events).run()
    assert ("started", "q", 70 * MILLISECOND, 0) in driven.told


def test_a_simulation_ends_with_its_last_event_though_blocks_were_held_until_later() -> None:
    events: list[tuple[int, Event]] = [
        (0, SubmitRequest(id="p", tokens=PROMPT, max_tokens=1, hold=True)),
        (SECOND, ReleaseKv(id="p")),
    ]
    driven = Driven(SMALL, events).run()
    assert driven.simulation.now == SECOND


def test_a_prompt_that_was_computed_elsewhere_is_pulled_and_goes_on_with_one_step_of_decoding() -> None:
    engine = Engine(SMALL)
    told = pulling(engine)
    assert told == [PullKv(id="d", at=0, tokens=14)]  # no pass, nothing to wake for
    assert (engine.running, engine.waiting, engine.pulling, engine.kv_usage) == (0, 0, 1, 4 / 64)
    engine.check()
    (stored, wake) = engine.handle(7 * MILLISECOND, KvPulled(id="d"))
    assert isinstance(stored, KvChanged) and stored.at == 7 * MILLISECOND
    assert stored.events[0].hashes == block_hashes(PROMPT, 4)  # type: ignore[union-attr]
    assert wake == Wake(at=7 * MILLISECOND)
    engine.handle(7 * MILLISECOND, Woken())
    assert only(engine.handle(12 * MILLISECOND, Woken()), EngineFirstToken) == EngineFirstToken(
        id="d", at=12 * MILLISECOND
    )
    done = only(engine.handle(SECOND, Woken()), EngineFinished)
    assert (done.tokens, done.cached, done.at) == (5, 0, 32 * MILLISECOND)  # type: ignore[attr-defined]
    counters = engine.counters(SECOND)
    assert (counters.pulled, counters.prompt, counters.prompt_cached) == (14, 14, 0)
    assert (counters.remote_queries, counters.remote_hits) == (14, 14)


def test_what_is_not_here_is_pulled_where_that_is_wanted() -> None:
    for config, tokens, cached in ((SMALL, 14, 0), (MISSING, 2, 12)):
        engine = Engine(config)
        prefilled(engine)
        engine.handle(SECOND, ReleaseKv(id="p"))
        assert only(pulling(engine, now=SECOND), PullKv).tokens == tokens  # type: ignore[attr-defined]
        engine.handle(2 * SECOND, KvPulled(id="d"))
        engine.handle(2 * SECOND, Woken())
        done = only(engine.handle(3 * SECOND, Woken()), EngineFinished)
        assert done.cached == cached and engine.counters(3 * SECOND).pulled == tokens  # type: ignore[attr-defined]


def test_who_waits_for_kv_is_no_running_sequence_and_goes_before_those_that_came_later() -> None:
    one = msgspec.structs.replace(SMALL, max_num_seqs=1)
    engine = Engine(one)
    pulling(engine)
    engine.handle(1, SubmitRequest(id="a", prompt=Prompt(8), max_tokens=3))
    engine.handle(1, Woken())
    assert (engine.running, engine.pulling) == (1, 1)
    engine.handle(2, SubmitRequest(id="b", prompt=Prompt(8), max_tokens=3))
    engine.handle(3, KvPulled(id="d"))
    assert (engine.running, engine.waiting, engine.pulling) == (1, 2, 0)
    told = engine.handle(21 * MILLISECOND, Woken())
    assert [effect.id for effect in told if type(effect).__name__ == "EngineStarted"] == ["d"]  # type: ignore[attr-defined]


def test_kv_that_does_not_come_is_computed_here_and_counted() -> None:
    engine = Engine(SMALL)
    pulling(engine)
    engine.handle(SECOND, KvPulled(id="d", ok=False))
    assert (engine.waiting, engine.pulling, engine.kv_usage) == (1, 0, 0.0)
    engine.handle(SECOND, Woken())
    first = only(engine.handle(SECOND + 10 * MILLISECOND, Woken()), EngineFirstToken)
    assert first.at == SECOND + 10 * MILLISECOND  # type: ignore[attr-defined]
    counters = engine.counters(2 * SECOND)
    assert (counters.pulls_failed, counters.pulled) == (1, 0)


def test_an_abort_frees_what_was_reserved_and_kv_that_comes_then_is_nobody_s() -> None:
    engine = Engine(SMALL)
    pulling(engine)
    done = only(engine.handle(5, AbortRequest(id="d")), EngineFinished)
    assert (done.reason, done.tokens) == ("abort", 0)  # type: ignore[attr-defined]
    assert engine.kv_usage == 0.0 and engine.pulling == 0
    assert engine.handle(6, KvPulled(id="d")) == []
    pulling(engine, "e", now=7)
    engine.handle(8, KvPulled(id="e"))
    engine.handle(8, AbortRequest(id="e"))  # it is here, but no pass has begun with it
    assert engine.kv_usage == 0.0 and engine.waiting == 0
    engine.check()


@given(small_engines(), st.data())
@settings(max_examples=deep(100), deadline=None)
def test_runs_of_blocks_come_to_the_same(config: SimSettings, data: st.DataObject) -> None:
    """Prompts that come as runs and as single names: the same milestones, KV events and snapshots."""
    of_names: list[tuple[int, Event]] = []
    of_runs: list[tuple[int, Event]] = []
    pulls: dict[str, tuple[int, bool]] = {}
    at = 0
    for number in range(data.draw(st.integers(1, 10))):
        at += data.draw(st.sampled_from([0, 7_000_013, 250_000_037]))
        blocks = data.draw(st.integers(1, 6))
        own = data.draw(st.integers(1, 4))
        names = [*(1 << 20 | i for i in range(blocks)), *((9 + number) << 20 | i for i in range(own))]
        isl = len(names) * config.block_size + data.draw(st.integers(0, config.block_size - 1))
        role = data.draw(st.sampled_from(["whole", "hold", "remote"]))
        submit = SubmitRequest(id=f"r{number}", prompt=Prompt(isl, names), max_tokens=9, hold=role == "hold")
        if role == "remote":
            submit = msgspec.structs.replace(submit, remote=isl)
            pulls[submit.id] = (data.draw(st.sampled_from([0, 9_000_053])), data.draw(st.booleans()))
        elif role == "hold":
            of_names.append((at + 90_000_047, ReleaseKv(id=submit.id)))
            of_runs.append(of_names[-1])
        of_names.append((at, submit))
        of_runs.append((at, msgspec.structs.replace(submit, prompt=Prompt(isl, chain_of(names)))))
    single, runs = (
        Driven(config, events, table=TABLE, pulls=pulls, runs=kind)
        for events, kind in ((of_names, False), (of_runs, True))
    )
    single.run()
    runs.run(until=data.draw(st.integers(0, SECOND)))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(runs.engine.snapshot(), enc_hook=plain))
    runs.engine.restore(state)
    runs.engine.check()
    runs.run()
    assert runs.told == single.told
    assert sorted(runs.kv, key=str) == sorted(single.kv, key=str)
    assert runs.engine.kv_usage == single.engine.kv_usage == 0.0


def test_a_snapshot_knows_what_is_held_and_what_is_on_its_way() -> None:
    engine = Engine(SMALL)
    prefilled(engine)
    pulling(engine, now=nanos(0.5))
    again = Engine(SMALL)
    again.restore(msgspec.json.decode(msgspec.json.encode(engine.snapshot())))
    assert again.snapshot() == engine.snapshot()
    assert (again.blocks_retained, again.pulling) == (4, 1)
    again.check()
    again.handle(SECOND, KvPulled(id="d"))
    again.handle(SECOND, ReleaseKv(id="p"))
    with pytest.raises(KeyError):
        again.answer("p")
    assert again.blocks_retained == 0 and again.waiting == 1
