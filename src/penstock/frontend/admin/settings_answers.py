"""Settings answers: live knobs and their changes, as the settings routes return them."""

import msgspec

KnobText = str | int | float | bool | None
"""A value as operators give it."""
KnobValue = KnobText | dict[str, float]


class KnobSinceStart(msgspec.Struct, frozen=True):
    """A knob that was changed: its value at the start and now."""

    start: KnobValue
    now: KnobValue


class ProcessSettings(msgspec.Struct, frozen=True):
    """The knobs of one frontend process."""

    name: str
    settings: dict[str, KnobValue]


class LiveSettings(msgspec.Struct, frozen=True):
    """Every live knob, those that were changed, and the knobs of each frontend process."""

    settings: dict[str, KnobValue]
    changed: dict[str, KnobSinceStart]
    frontends: list[ProcessSettings]


class KnobChange(msgspec.Struct, frozen=True):
    """A knob that was changed now."""

    old: KnobValue
    new: KnobValue


class SettingsSet(msgspec.Struct, frozen=True):
    """What POST /admin/set changed, and the value of every knob that it named."""

    changed: dict[str, KnobChange]
    values: dict[str, KnobValue]
