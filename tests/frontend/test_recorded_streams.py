"""Does each event of our streams have every field, of the same type, that the vendor's has in the same place?"""

import json
from typing import Any

import pytest

from tests.frontend.recorded_streams import MESSAGES, RESPONSES, Events
from tests.frontend.scripted_answers import CALLS, script
from tests.frontend.stand import stand

KINDS = {"type", "status", "role", "object", "stop_reason"}


def differences(recorded: Any, ours: Any, where: str) -> list[str]:
    """Return what a client that relies on the recorded value would miss in ours."""
    if isinstance(recorded, dict):
        if not isinstance(ours, dict):
            return [f"{where} is {ours!r}, not an object"]
        missing = [f"{where}.{name} is missing" for name in recorded.keys() - ours.keys()]
        return missing + [
            text
            for name in recorded.keys() & ours.keys()
            for text in (
                [f"{where}.{name} is {ours[name]!r}, not {recorded[name]!r}"]
                if name in KINDS and recorded[name] != ours[name]
                else differences(recorded[name], ours[name], f"{where}.{name}")
            )
        ]
    if isinstance(recorded, list):
        if not isinstance(ours, list) or len(ours) < len(recorded):
            return [f"{where} is {ours!r}, not {recorded!r}"]
        return [
            text
            for number, (theirs, mine) in enumerate(zip(recorded, ours, strict=False))
            for text in differences(theirs, mine, f"{where}[{number}]")
        ]
    if recorded is not None and type(recorded) is not type(ours):
        return [f"{where} is {ours!r}, not such as {recorded!r}"]
    return []


def events_of(stream: bytes) -> Events:
    """Return the events of a stream; those that only keep it open are left out."""
    found = []
    for event in stream.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in lines and lines.get("event") != "ping":
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


@pytest.mark.parametrize(
    ("path", "body", "recorded"),
    [
        ("/v1/messages", {"max_tokens": 50, "messages": [{"role": "user", "content": "How is it?"}]}, MESSAGES),
        ("/v1/responses", {"input": "How is it?"}, RESPONSES),
    ],
)
async def test_every_event_is_as_the_vendors_is(path: str, body: dict[str, Any], recorded: Events) -> None:
    async with stand() as s:
        s.engines[0].reply = script("It rains.", thinking="hm", calls=CALLS[:1], finish="tool_calls")
        answer = await s.http.post(path, json={"model": "m", "stream": True, **body})
        ours = events_of(await answer.read())
        assert [name for name, _ in ours] == [name for name, _ in recorded]
        wrong = [text for (name, data), (_, mine) in zip(recorded, ours) for text in differences(data, mine, name)]
        assert not wrong, "\n".join(wrong)
        if path == "/v1/responses":
            assert [data["sequence_number"] for _, data in ours] == list(range(len(ours)))


def test_a_difference_is_seen() -> None:
    recorded = {"type": "a", "item": {"id": "x", "content": [{"type": "text"}]}, "usage": None}
    assert not differences(recorded, {**recorded, "more": 1}, "e")
    for changed in (
        {"type": "b", "item": recorded["item"], "usage": None},
        {"type": "a", "item": {"id": 1, "content": [{"type": "text"}]}, "usage": None},
        {"type": "a", "item": {"id": "x", "content": []}, "usage": None},
        {"type": "a", "item": recorded["item"]},
    ):
        assert len(differences(recorded, changed, "e")) == 1, changed
