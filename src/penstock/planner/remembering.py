"""`Remembering`: a part of the planner whose memory is what its class declares, so that its snapshot follows.

What a class body annotates is memory, and goes into the snapshot; what ``__init__`` alone sets are settings, and stays
as the running process has it. Other parts below are restored in place, so they keep their settings, too.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from penstock.kernel.machine import Snapshot


class Remembering:
    """Base of such a part."""

    def snapshot(self) -> Snapshot:
        """Return the memory as plain data."""
        return {name.lstrip("_"): plain(getattr(self, name)) for name in memory_of(type(self))}

    def restore(self, state: Snapshot) -> None:
        """Restore the memory that `snapshot` wrote.

        Raises:
            KeyError, msgspec.ValidationError: it is not that of such a part.
        """
        for name, hint in memory_of(type(self)).items():
            setattr(self, name, self._restored(name, hint, state[name.lstrip("_")]))

    def part(self, name: str, key: str) -> Any:
        """Return a new part for a key of a mapping of parts that are made on demand."""
        return get_args(memory_of(type(self))[name])[1]()

    def _restored(self, name: str, hint: Any, state: Any) -> Any:
        present = getattr(self, name)
        if isinstance(present, Remembering):
            present.restore(state)
            return present
        if isinstance(present, np.ndarray):
            return np.array(state)
        if isinstance(present, list) and any(isinstance(each, Remembering) for each in present):
            for part, saved in zip(present, state, strict=True):
                part.restore(saved)
            return present
        if get_origin(hint) is dict and _is_part(get_args(hint)[1]):
            parts = {key: present[key] if key in present else self.part(name, key) for key in state}
            for key, part in parts.items():
                part.restore(state[key])
            return parts
        return msgspec.convert(state, hint, str_keys=True)


memory_of: Callable[[Any], Mapping[str, Any]] = cache(get_type_hints)
"""Class -> what it and its bases declare: attribute -> type."""


def _is_part(hint: Any) -> bool:
    return isinstance(hint, type) and (issubclass(hint, Remembering) or getattr(hint, "_is_protocol", False))


def plain(value: Any) -> Any:
    """Return a value as plain data: the parts and arrays in it, too."""
    if isinstance(value, Remembering):
        return value.snapshot()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, Remembering) for each in value):
        return [plain(each) for each in value]
    return msgspec.to_builtins(value)
