"""Is what callers ask of routing read as the field writes it?"""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.frontend.exchange.upstream_request import UpstreamRequest, engine_body, ignored_hints
from penstock.frontend.prompt.request_body import parse
from penstock.frontend.prompt.routing_hints import RoutingHints, read_hints
from penstock.kernel.errors import ClientError
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import Handoff, Preferences


def read(nvext: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **fields: Any) -> RoutingHints:
    return read_hints(CIMultiDict(headers or {}), nvext or {}, fields)


def test_nothing_asked_is_nothing_preferred() -> None:
    assert read() == RoutingHints(Preferences())


def test_nvext_fields() -> None:
    found = read(
        {
            "agent_hints": {"priority": 5, "strict_priority": 2, "osl": 300, "speculative_prefill": True},
            "agent_context": {"session_id": "s1", "trajectory_id": "t"},
            "program_id": "p",
            "context_type": "tool",
            "backend_instance_id": 123,
            "cache_salt": "salt",
            "extra_fields": ["timing", "worker_id", "engine_data"],
            "token_data": [1, 2],
            "annotations": ["x"],
        }
    )
    assert found.preferences == Preferences(
        worker="123",
        priority=5,
        strict=2,
        osl=300,
        session="s1",
        program="p",  # type: ignore[arg-type]
        service_class="tool",
    )
    assert (found.salt, found.extra) == ("salt", ("worker_id", "timing"))
    assert found.token_data == [1, 2]


def test_headers_win_and_ours_win_over_theirs() -> None:
    nvext = {"agent_hints": {"priority": 1}, "session_control": {"session_id": "body"}, "backend_instance_id": "w0"}
    theirs = {
        "X-Dynamo-Request-Priority": "2",
        "x-dynamo-session-id": "header",
        "x-dynamo-worker-instance-id": "w1",
        "x-data-parallel-rank": "3",
        "x-dynamo-request-strict-priority": "9",
    }
    found = read(nvext, theirs).preferences
    assert (found.priority, found.session, found.worker, found.rank, found.strict) == (2, "header", "w1", 3, 9)
    ours = {**theirs, "x-penstock-priority": "-4", "x-penstock-session-id": "mine", "x-penstock-worker": "w2"}
    found = read(nvext, ours).preferences
    assert (found.priority, found.session, found.worker) == (-4, "mine", "w2")


def test_program_keeps_together_where_there_is_no_session() -> None:
    assert read({"program_id": "p"}).preferences.session == "p"
    assert read({"program_id": "p"}, {"x-penstock-session-id": "s"}).preferences.session == "s"


def test_overrides_and_lists() -> None:
    found = read(
        headers={
            "x-penstock-overlap-credit": "0",
            "x-penstock-router-temperature": "0.5",
            "x-penstock-allowed-workers": "a, b,,c",
            "x-penstock-timeout": "2.5",
        }
    )
    assert found.preferences.allowed == ("a", "b", "c") and found.timeout == 2.5
    assert (found.preferences.overlap_credit, found.preferences.temperature) == (0.0, 0.5)


@pytest.mark.parametrize(
    "nvext",
    [
        {"agent_hints": []},
        {"agent_hints": {"priority": 2**31}},
        {"agent_hints": {"priority": True}},
        {"agent_hints": {"strict_priority": -1}},
        {"agent_context": "x"},
        {"session_control": {"session_id": 5}},
        {"program_id": ""},
        {"context_type": ["a"]},
        {"backend_instance_id": 1.5},
        {"backend_instance_id": ""},
        {"backend_instance_id": True},
        {"token_data": "abc"},
        {"token_data": [1, True]},
        {"extra_fields": [1]},
        {"cache_salt": "x" * 257},
        {"cache_control": True},
        {"cache_control": {"ttl": 5}},
        {"cache_control": {"type": "ephemeral", "ttl": "soon"}},
        {"cache_control": {"type": "ephemeral", "ttl": 0}},
        {"cache_control": {"type": "ephemeral", "ttl": "8000000s"}},
        {"cache_control": {"type": "ephemeral", "ttl": True}},
    ],
)
def test_malformed_values_name_their_field(nvext: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        read(nvext)
    assert caught.value.status == 400 and caught.value.param is not None and "nvext" in caught.value.param


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300), ("1h", 3600), ("90s", 90), (7, 7), (0.5, 0.5)])
def test_a_pin_is_read_in_seconds(ttl: Any, seconds: float) -> None:
    found = read({"cache_control": {"type": "ephemeral", "ttl": ttl}, "context_type": "system"})
    assert found.pin == seconds and found.uncertain


def test_pins_and_priorities_that_nobody_wrote_down() -> None:
    assert read({"cache_control": {"type": "ephemeral"}}).pin == 300
    system = read({"context_type": "system"})
    assert (system.pin, system.uncertain) == (3600, False)
    assert (read({"context_type": "tool"}).pin, read({"cache_control": None}).pin) == (0, 0)
    assert [read({"agent_hints": {"priority": each}}).keep for each in (5, -5)] == [5, 0]


def test_top_level_salt_is_read_and_checked() -> None:
    assert read(cache_salt="a").salt == "a"
    assert read({"cache_salt": "b"}, cache_salt="a").salt == "b"
    with pytest.raises(ClientError):
        read(cache_salt=5)


def test_both_legs_of_a_hand_off_carry_the_hints() -> None:
    source = WorkerCard(id=WorkerId("p"), epoch=1, model="m", url="http://p", labels={"kv_tiers": "priority"})
    parsed = parse("chat_completions", b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}')
    hints = read({"cache_control": {"type": "ephemeral", "ttl": 60}})
    job = UpstreamRequest("/", parsed.raw, "", "chat_completions", False, parsed, hints)
    word: Any = SimpleNamespace(
        card=source, target=None, prefetch_after=None, handoff=Handoff(protocol="completed", key=1, source=source)
    )
    body = json.loads(engine_body(job, dialect_of("sim"), word, None, handed={"kv_transfer_params": {"remote": 1}}))
    assert body["kv_transfer_params"] == {"remote": 1, "penstock": {"pin": 60}}
    word.card = msgspec.structs.replace(source, labels={})
    body = json.loads(engine_body(job, dialect_of("sim"), word, None, handed={"kv_transfer_params": {"remote": 1}}))
    assert body["kv_transfer_params"] == {"remote": 1}
    assert ignored_hints(job, word) == ()  # the worker of the prefill keeps them
    word.handoff = None
    assert ignored_hints(job, word) == ("cache_control",)


RUN = "1b4f7d6e-8c1a-4f0e-9d55-0c3f2a7b9e10"


@pytest.mark.parametrize(
    ("headers", "fields", "session", "program"),
    [
        ({}, {"prompt_cache_key": "k"}, "k", None),
        ({}, {"metadata": {"thread_id": "t", "run_id": "r"}}, "t", "r"),
        ({}, {"prompt_cache_key": "k", "metadata": {"session_id": "s"}}, "k", None),
        ({"langsmith-trace": f"20261125T081500000001Z{RUN}.20261125T081501000001Z{RUN[::-1]}"}, {}, RUN, RUN),
        ({"langsmith-trace": "nonsense"}, {}, None, None),
        ({}, {"user": 7, "metadata": "x", "prompt_cache_key": ""}, None, None),
        ({"x-penstock-session-id": "h"}, {"prompt_cache_key": "k", "metadata": {"program_id": "p"}}, "h", "p"),
    ],
)
def test_frameworks_tell_session_and_program_in_their_own_words(
    headers: dict[str, str], fields: dict[str, Any], session: str | None, program: str | None
) -> None:
    preferences = read(None, headers, **fields).preferences
    assert (preferences.session, preferences.program) == (session, program)
    assert read_hints(headers, {}, fields).preferences == preferences


def test_a_person_is_a_program_of_which_nobody_reads_the_name() -> None:
    one = read(None, user="ann@example.org").preferences
    assert one.program is not None and one.program.startswith("user-") and "ann" not in one.program
    assert one.session == one.program == read(None, safety_identifier="ann@example.org").preferences.session
    assert read(None, user="bob").preferences.program != one.program


def test_nvext_wins_over_a_framework_and_a_long_key_is_shortened() -> None:
    assert read({"program_id": "p"}, user="ann").preferences.program == "p"
    session = read(None, prompt_cache_key="x" * 4000).preferences.session
    assert session is not None and len(session) == 12
