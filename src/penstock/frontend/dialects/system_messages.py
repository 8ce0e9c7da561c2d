"""System messages of another API's conversation, brought to where its model's chat template takes them.

Most templates take one, at the beginning, and refuse a later one; agents write them between turns.
"""

from collections.abc import Iterator

from penstock.config.settings.cluster_settings import LateSystem, ModelSettings
from penstock.frontend.service import Service
from penstock.kernel.values import JsonObject

_MARKED = "<system>\n{}\n</system>"


def with_one_system(service: Service, chat: JsonObject) -> JsonObject:
    """Return a chat whose system messages are as its model's settings say.

    Raises:
        ClientError: 404: there is no such model.
    """
    entry = service.settings.models.get(service.catalog.resolve(chat["model"]).model, ModelSettings())
    return {**chat, "messages": folded(chat["messages"], entry.late_system)}


def folded(messages: list[JsonObject], late: LateSystem) -> list[JsonObject]:
    """Return messages of which the system messages at the beginning are one, and later ones are where ``late`` says."""
    first: list[str] = []
    rest: list[JsonObject] = []
    moved = False
    """Whether the last of ``rest`` is what a system message became."""
    for message in messages if late == "keep" else _behind_results(messages):
        role, content = message["role"], message["content"]
        late_one = role == "system" and late != "keep"
        if role == "system" and isinstance(content, str) and (not rest or late == "first"):
            first.append(content)
            continue
        if late_one:
            message = {"role": "user", "content": _MARKED.format(content) if isinstance(content, str) else content}
        # Many templates want the turns of user and model to alternate.
        if rest and rest[-1]["role"] == message["role"] == "user" and (late_one or moved):
            rest[-1] = {**rest[-1], "content": joined(rest[-1]["content"], message["content"])}
        else:
            rest.append(message)
        moved = late_one
    return [{"role": "system", "content": "\n\n".join(first)}, *rest] if first else rest


def _behind_results(messages: list[JsonObject]) -> Iterator[JsonObject]:
    """Yield messages, those of the system between a call and its results behind these: templates want both together."""
    held: list[JsonObject] = []
    for message in messages:
        if message["role"] == "system":
            held.append(message)
            continue
        if message["role"] != "tool":
            yield from held
            held = []
        yield message
    yield from held


def speak(messages: list[JsonObject], fields: JsonObject) -> None:
    """Add what the model said to its present turn: other APIs have several items or messages for one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    turn = messages[-1]
    for name, value in fields.items():
        before = turn.get(name)
        if name != "role":
            turn[name] = joined(before, value) if before and value else before or value


def joined(one: str | list[JsonObject], two: str | list[JsonObject]) -> str | list[JsonObject]:
    """Return two contents as one, or two lists."""
    if isinstance(one, str) and isinstance(two, str):
        return f"{one}\n\n{two}"
    return [
        part
        for content in (one, two)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
