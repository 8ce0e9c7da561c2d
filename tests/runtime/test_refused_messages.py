"""Is what a frontend leaves out of others' messages counted, and said where an operator can do something about it?"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.cluster_state.refused_messages import MessageSources, findings, refusals


def sources(**left_out: int) -> MessageSources:
    feeds: Any = SimpleNamespace(handshakes_failed=0, refused=[], left_out=Counter(left_out))
    store: Any = SimpleNamespace()
    membership: Any = SimpleNamespace(newer=0)
    return MessageSources(store, None, None, membership, feeds)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [({"group": 9, "remote": 2}, ""), ({"type": 1}, "a type that"), ({"medium": 3, "type": 1}, "a type and a medium")],
)
def test_kv_events_that_are_not_understood_are_counted_and_said(left_out: dict[str, int], words: str) -> None:
    counts = refusals(sources(**left_out))
    assert counts == {f"kv_events_left_out_{reason}": count for reason, count in left_out.items()}
    assert [words in finding.text for finding in findings(sources(**left_out))] == ([True] if words else [])
