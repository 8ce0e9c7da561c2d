"""Messages between our processes, one of each kind with every field set, and the schemas of their readers.

usage: PYTHONPATH=CODE/src python record_messages.py VERSION > data/VERSION.json

It runs under the code of a version (`git archive COMMIT src | tar -x -C CODE`), so it imports nothing but that code and
msgspec. The files in data/ were made so, once each; an earlier version never changes, so they are not made again. At a
release, make its file, and delete the oldest: `test_wire_contract.py` holds today's code to those that are there.
"""

import base64
import importlib
import json
import sys
from typing import Any

import msgspec
from msgspec import inspect

STATE = "penstock.runtime.cluster_state"
JSON, BINARY = msgspec.json, msgspec.msgpack
KINDS: dict[str, tuple[str, str, Any]] = {
    "worker entry": (f"{STATE}.membership", "MembershipEntry", JSON),
    "frontend entry": (f"{STATE}.placement_sync", "FrontendCard", JSON),
    "placements": (f"{STATE}.placement_sync", "PlacementBatch", BINARY),
    "crash entry": (f"{STATE}.crash_log", "Crash", JSON),
    **{
        name: (f"{STATE}.desired_state", name, JSON)
        for name in (
            *("PoolSpec", "DrainSpec", "RoleSpec", "SettingSpec", "RestartSpec", "PoolStatus", "DrainAck"),
            *("MembershipAcks", "DrainStatus", "RestartStatus"),
        )
    },
    "planner report": ("penstock.runtime.planning.planner_report", "PlannerReport", JSON),
    "counters": ("penstock.adapters.sources.frontend_counters", "ClusterCounters", JSON),
    "store entry's header": ("penstock.adapters.stores.entry_codec", "_EntryHeader", JSON),
    "forward pass": ("penstock.kernel.pass_report", "PassReport", BINARY),
    "relayed KV events": ("penstock.runtime.kv_events.kv_relay_messages", "SnapshotPart", BINARY),
    "question for KV events": ("penstock.runtime.kv_events.kv_relay_messages", "ReplayQuestion", BINARY),
    "agent metadata": ("penstock_kv.transfer.agent_metadata", "AgentMetadata", BINARY),
    "block set": ("penstock_kv.transfer.layouts.block_set", "BlockSet", BINARY),
    **{
        f"tier {name}": ("penstock_kv.inside.tier_protocol", name, BINARY)
        for name in (
            *("TierHello", "TierWelcome", "AskBlocks", "AnswerBlocks", "StoreBlocks", "LoadBlocks", "CancelJob"),
            *("UsedBlocks", "PrefetchBlocks", "PrefillSpeed", "JobDone", "RemovedBlocks"),
        )
    },
}
"""What it is -> module, class, codec. A version that lacks the module or the class does not send it."""

CHECKED: dict[str, Any] = {"dtype": "bfloat16", "rank": 0}
"""Fields that a constructor checks, beyond what their types say."""


def type_of(kind: str) -> Any:
    """Return the class of a kind; None where this code has none."""
    module, name, _ = KINDS[kind]
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def sample(type: inspect.Type | Any) -> Any:
    """Return a value of a type with every field set; a version stays what it is."""
    if isinstance(type, inspect.StructType | inspect.NamedTupleType | inspect.DataclassType):
        return type.cls(**{field.name: _of_field(field) for field in type.fields})
    if isinstance(type, inspect.UnionType):
        return sample(next(one for one in type.types if not isinstance(one, inspect.NoneType)))
    if isinstance(type, inspect.LiteralType):
        return type.values[0]
    if isinstance(type, inspect.EnumType):
        return next(iter(type.cls))
    if isinstance(type, inspect.DictType):
        return {sample(type.key_type): sample(type.value_type)}
    if isinstance(type, inspect.TupleType):
        return tuple(sample(one) for one in type.item_types)
    if isinstance(type, inspect.CollectionType):
        items = [sample(type.item_type)]
        return tuple(items) if isinstance(type, inspect.VarTupleType) else items
    return _plain(type)


def _of_field(field: inspect.Field) -> Any:
    if field.name == "version" or isinstance(field.type, inspect.CustomType):
        return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return CHECKED[field.name] if field.name in CHECKED else sample(field.type)


def _plain(type: inspect.Type) -> Any:
    plain = {
        inspect.IntType: 1,
        inspect.FloatType: 1.5,
        inspect.BoolType: True,
        inspect.StrType: "text",
        inspect.BytesType: b"bytes",
        inspect.AnyType: 1,
        inspect.NoneType: None,
    }
    return plain[type.__class__]


def message(kind: str) -> bytes | None:
    """Return the bytes of a message of a kind as this code writes it; None where it writes none."""
    cls = type_of(kind)
    return None if cls is None else KINDS[kind][2].encode(sample(inspect.type_info(cls)))


def main(version: str) -> None:
    kinds = {}
    for kind, (_, _, codec) in KINDS.items():
        raw = message(kind)
        if raw is not None:
            text = raw.decode() if codec is JSON else base64.b64encode(raw).decode()
            kinds[kind] = {"message": text, "schema": msgspec.json.schema(type_of(kind))}
    json.dump({"version": version, "kinds": kinds}, sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
