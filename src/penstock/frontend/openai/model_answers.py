"""Model answers: what the model and health routes return."""

from typing import Literal

import msgspec

Capability = Literal["chat", "completions", "embeddings", "tools", "reasoning", "vision", "adapters"]


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as OpenAI lists it.

    ``root``: the model behind a name; of a name that models share, the one with the largest weight. ``parent``: of a
    LoRA adapter, its base model. ``capabilities``: those that are known; another may be there as well.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    capabilities: list[Capability] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


class ModelReady(msgspec.Struct, frozen=True):
    """Whether a model can be served now, and by how many workers."""

    id: str
    ready: bool
    workers: int


class Health(msgspec.Struct, frozen=True):
    """Whether this endpoint can serve. ``models``: ready workers; ``degraded``: some model has none."""

    status: Literal["ok", "degraded", "unready", "draining"]
    models: dict[str, int]
    notes: list[str]


class Live(msgspec.Struct, frozen=True):
    """A process that answers."""

    status: Literal["ok"] = "ok"
