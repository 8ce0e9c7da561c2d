"""Effects of a machine in tests: whole lists compared with patterns, and one effect picked out."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from penstock.kernel.machine import Effect

E = TypeVar("E", bound=Effect)


class EffectPattern:
    """Equals any effect of a kind with the given fields: made by `like`."""

    def __init__(self, kind: type[Effect], fields: Mapping[str, object]) -> None:
        unknown = fields.keys() - set(kind.__struct_fields__)
        if unknown:
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        self._kind = kind
        self._fields = fields

    def __eq__(self, other: object) -> bool:
        return type(other) is self._kind and all(getattr(other, name) == value for name, value in self._fields.items())

    def __repr__(self) -> str:
        return f"like({self._kind.__name__}{''.join(f', {name}={value!r}' for name, value in self._fields.items())})"


def like(kind: type[Effect], **fields: object) -> EffectPattern:
    """Return what equals an effect of a kind with these fields, so that whole lists are compared.

        assert machine.handle(now, event) == [like(Spawn, worker="main-0"), like(Wake)]

    Raises:
        TypeError: the kind has no such field.
    """
    return EffectPattern(kind, fields)


def only(effects: Sequence[Effect], kind: type[E]) -> E:
    """Return the one effect of a kind."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {effects}"
    return found[0]


def none(effects: Sequence[Effect], kind: type[Effect]) -> bool:
    """Return whether no effect is of a kind."""
    return not any(isinstance(effect, kind) for effect in effects)
