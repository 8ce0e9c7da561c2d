"""Is what callers ask of routing read as the field writes it?"""

from typing import Any

import pytest
from multidict import CIMultiDict

from penstock.frontend.prompt.routing_hints import RoutingHints, read_hints
from penstock.kernel.errors import ClientError
from penstock.router.events import Preferences


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
    ],
)
def test_malformed_values_name_their_field(nvext: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        read(nvext)
    assert caught.value.status == 400 and caught.value.param is not None and "nvext" in caught.value.param


def test_top_level_salt_is_read_and_checked() -> None:
    assert read(cache_salt="a").salt == "a"
    assert read({"cache_salt": "b"}, cache_salt="a").salt == "b"
    with pytest.raises(ClientError):
        read(cache_salt=5)
