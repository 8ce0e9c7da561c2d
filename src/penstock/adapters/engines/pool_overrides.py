"""Pool overrides: the `WorkerCard` fields that come from a pool's settings, since its engines do not report them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.settings.client_fields import CLIENT_FIELDS
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.config.settings.parser_names import OWN_PREFIX

WITH_TIERS = ("vllm", "sim")
"""Kinds of engine that get KV tiers from us."""
TOOL_PARSER = "tool_parser"
REASONING_PARSER = "reasoning_parser"
"""Labels with the formats that Penstock parses in an engine's answers."""
CHAT_TEMPLATE = "chat_template"
"""Label of engines whose model has a chat template in the settings: how they get it."""
AS_FLAG, TAKEN, REFUSED, UNTRIED = "flag", "request", "refused", "untried"
"""Its values: by a flag, with each chat, not at all; or nobody has asked the server yet."""
UNLISTED = "unlisted"
"""Label of a server that serves its model by the word of the settings: why its own list does not say so."""
TEMPLATE_FLAGS = {
    "sim": "--chat-template",
    "vllm": "--chat-template",
    "sglang": "--chat-template",
    "llamacpp": "--chat-template-file",
}
"""Kind of engine -> the flag by which one that is started here gets a chat template's file."""
GUESSED = ("sim", "openai")
"""Kinds that are no override where a pool of URLs names them: each server is asked for its kind."""


def overrides_of(pool: PoolSettings, url: str | None = None) -> dict[str, Any]:
    """Return the settings' fields for each engine of a pool, or for the engine at ``url``; the rest is absent."""
    overrides: dict[str, Any] = {
        "role": pool.role,
        "handoff": pool.handoff,
        "layout": pool.layout,
        "block_size": pool.block_size,
        "kv_blocks": pool.kv_blocks,
        "max_model_len": pool.max_model_len,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "adapter_slots": pool.max_cpu_loras,
    }
    labels = {**pool.labels}
    if takes_priority(pool) or pool.priority is not None:
        labels["priority"] = "on" if takes_priority(pool) else "off"  # whatever the server says
    if pool.client_fields:
        labels[CLIENT_FIELDS] = " ".join(pool.client_fields)
    if is_file(labels.get(CHAT_TEMPLATE)):
        labels[CHAT_TEMPLATE] = AS_FLAG if template_flag(pool) else UNTRIED
    if not parses_itself(pool, pool.tool_parser):
        labels |= {TOOL_PARSER: pool.tool_parser} if pool.tool_parser is not None else {}
    if not parses_itself(pool, pool.reasoning_parser):
        labels |= {REASONING_PARSER: pool.reasoning_parser} if pool.reasoning_parser is not None else {}
    if labels:
        overrides["labels"] = labels
    if url is not None:
        overrides["engine"] = None if pool.engine in GUESSED else pool.engine
        overrides["topic"] = pool.topic
        events, replay = endpoints(pool.events, url), endpoints(pool.replay, url)
        overrides["events"], overrides["replay"] = events or None, replay or None
        overrides["ranks"] = len(events) or None
        overrides["stats"] = next(iter(endpoints(pool.stats, url)), None)
    return {name: value for name, value in overrides.items() if value is not None}


def with_template(pool: PoolSettings, file: str | None) -> PoolSettings:
    """Return a pool that knows its model's chat template; an operator who labels it otherwise knows better."""
    if file is None or CHAT_TEMPLATE in pool.labels:
        return pool
    path = str(Path(file).expanduser().absolute())
    return msgspec.structs.replace(pool, labels={**pool.labels, CHAT_TEMPLATE: path})


def template_flag(pool: PoolSettings) -> dict[str, str | None]:
    """Return the flag with the model's chat template for engines that are started here; empty where there is none."""
    file, flag = pool.labels.get(CHAT_TEMPLATE), TEMPLATE_FLAGS.get(pool.engine)
    return {} if pool.attached or flag is None or not is_file(file) else {flag: file}


def is_file(label: str | None) -> bool:
    """Return whether a label of `CHAT_TEMPLATE` is a file's path yet."""
    return label is not None and label.startswith("/")


def parses_itself(pool: PoolSettings, parser: str | None) -> bool:
    """Return whether the pool's engines get a parser as a flag of theirs, because they are started here and have some.

    Args:
        parser: its name.
    """
    if parser is None or parser.startswith(OWN_PREFIX) or pool.attached:
        return False
    if pool.engine == "llamacpp":
        return Path(pool.program).name.startswith("llama-server")
    return pool.engine in ("vllm", "sglang")


def takes_priority(pool: PoolSettings) -> bool:
    """Return whether a request's priority is sent to the pool's engines: an engine not scheduling by it refuses."""
    if pool.priority is not None:
        return pool.priority
    if pool.attached:
        return False  # the operator started them
    return pool.engine == "vllm" or (pool.engine == "sim" and pool.sim.scheduling_policy == "priority")


def endpoints(given: Iterable[str], url: str) -> tuple[str, ...]:
    """Return the endpoints of a server, one for each of its ranks.

    Args:
        given: ``ENDPOINT``, which is for every server, or ``URL=ENDPOINT``.
    """
    addresses = []
    for entry in given:
        server, equals, endpoint = entry.rpartition("=")
        if not equals or server.rstrip("/") == url.rstrip("/"):
            addresses.append(endpoint)
    return tuple(addresses)
