"""Names of vLLM's tiering seam, which moved between its versions; a version without them is refused.

vLLM 0.32 has ``TransferJob`` with ``chunk_ids``, and look-ups give a ``LookupResult``. Before that, jobs were
``JobMetadata`` with ``block_ids``, look-ups gave ``bool | None``, and results had no keys of their own.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from penstock.kernel.errors import ConfigError

RUN_WITH = "0.32"
"""The vLLM that `make test-vllm` starts."""


class TierSeam:
    """What differs between versions, found in two of vLLM's modules.

    Args:
        base: ``vllm.v1.kv_offload.base``.
        tiering: ``vllm.v1.kv_offload.tiering.base``.
        version: of vLLM, for the message.
    Raises:
        ConfigError: it is none of the shapes that are known.
    """

    def __init__(self, base: ModuleType, tiering: ModuleType, version: str) -> None:
        lookup = getattr(base, "LookupResult", None)
        self.hit: Any = True if lookup is None else lookup.HIT
        self.miss: Any = False if lookup is None else lookup.MISS
        self.retry: Any = None if lookup is None else lookup.RETRY
        self._job = getattr(tiering, "TransferJob", None) or getattr(tiering, "JobMetadata", None)
        self._result = getattr(tiering, "JobResult", None)
        manager = getattr(tiering, "SecondaryTierManager", None)
        job_fields, result_fields = _field_names(self._job), _field_names(self._result)
        self._rows = next((name for name in ("chunk_ids", "block_ids") if name in job_fields), "")
        self._partial = "successful_keys" in result_fields
        lacking = [
            name
            for name, there in (
                ("TransferJob.chunk_ids", self._rows),
                ("TransferJob.is_promotion", "is_promotion" in job_fields),
                ("JobResult.success", "success" in result_fields),
                ("SecondaryTierManager.get_finished_jobs", hasattr(manager, "get_finished_jobs")),
            )
            if not there
        ]
        if lacking:
            raise ConfigError(
                f"vLLM {version} has another tiering seam than the ones known here: no {', '.join(lacking)}",
                hint=f"use vLLM {RUN_WITH}, or start without secondary_tiers of Penstock's",
            )

    def rows(self, job: Any) -> list[int]:
        """Return a job's rows of the primary tier."""
        return [int(row) for row in getattr(job, self._rows)]

    def job(self, number: int, key: bytes, row: int, *, load: bool, context: Any) -> Any:
        """Return a job of one block, which vLLM's tiering manager knows nothing of."""
        import torch  # vLLM's tiers take rows in an array

        rows = torch.tensor([row], dtype=torch.int32).numpy()
        fields = {"job_id": number, "keys": [key], self._rows: rows, "is_promotion": load, "req_context": context}
        known = _field_names(self._job)
        return self._job(**{name: value for name, value in fields.items() if name in known})  # type: ignore[misc]

    def part(self, job: Any, places: Sequence[int]) -> Any:
        """Return a job for some of the blocks of another one."""
        keys, rows = list(job.keys), getattr(job, self._rows)
        return dataclasses.replace(job, **{"keys": [keys[place] for place in places], self._rows: rows[list(places)]})

    def result(self, job: int, right: Collection[bytes], wrong: Collection[bytes], like: Any = None) -> Any:
        """Return a job's result. Where ``wrong`` has keys it is a failure, in which the right ones still count.

        Args:
            like: result of the tier below, whose measurements are passed on.
        """
        extra = {} if like is None else {name: getattr(like, name) for name in _field_names(like) if name in _MEASURED}
        if wrong and right and self._partial:
            extra["successful_keys"] = tuple(right)
        return self._result(job_id=job, success=not wrong, **extra)  # type: ignore[misc]

    def right_keys(self, result: Any, keys: Collection[bytes]) -> list[bytes]:
        """Return the keys of a job that a tier says it has moved."""
        if result.success:
            return list(keys)
        some = set(getattr(result, "successful_keys", None) or ())
        return [key for key in keys if key in some]


def row_layout(spec: Any, row_bytes: int) -> str:
    """Return a name for all that decides the bytes of a row of vLLM's host memory besides its key."""
    config = spec.config
    parts = (
        config.model,
        [(group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups],
        config.cache,
        config.parallel.tp_size,
        config.parallel.pp_size,
        config.replicated_layout,
        config.canonical_layout,
        config.kv_cache_layout,
        row_bytes,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


_MEASURED = ("transfer_time", "transfer_bytes")


def _field_names(struct: Any) -> set[str]:
    if struct is None:
        return set()
    if dataclasses.is_dataclass(struct):
        return {field.name for field in dataclasses.fields(struct)}
    return set(getattr(struct, "_fields", ()))


class TierResidency:
    """Which tiers of one medium have a block: merges their removals; takes vLLM's ``OffloadingEvent``.

    vLLM's own host tier and the tier process both have blocks in host memory, and routers know one host tier per
    engine: a block that leaves vLLM's is still there.
    """

    def __init__(self) -> None:
        self._bits: dict[str | None, int] = {}
        """Owner -> its bit. None is vLLM's own tier."""
        self._owners: dict[tuple[Any, bytes], int] = {}
        """Medium and key -> bits of those who have the block."""

    def merge(self, events: Iterable[Any]) -> Iterator[Any]:
        """Yield all stored blocks, and of removed ones those that no other owner has in this medium."""
        for event in events:
            bit = self._bits.setdefault(event.ownership, 1 << len(self._bits))
            places = [(event.medium, key) for key in event.keys]
            if not event.removed:
                for place in places:
                    self._owners[place] = self._owners.get(place, 0) | bit
                yield event
                continue
            gone = []
            for place in places:
                left = self._owners.pop(place, 0) & ~bit
                if left:
                    self._owners[place] = left
                else:
                    gone.append(place[1])
            if gone:  # under the name that vLLM has for its records of the block, which it drops with this
                yield dataclasses.replace(event, keys=gone, ownership=None)

    def cleared(self) -> None:
        """vLLM's own tier is empty, and has announced that in its own way."""
        bit = self._bits.get(None, 0)
        for place, owners in list(self._owners.items()):
            if owners == bit:
                del self._owners[place]
            else:
                self._owners[place] = owners & ~bit
