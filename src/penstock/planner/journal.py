"""Journal of the planner: its events and their effects, so that its decisions can be replayed."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.journal_frames import Header, MachineBook, Record
from penstock.kernel.machine import Effect, Event, Snapshot, Woken
from penstock.kernel.values import RequestShape, Role, Slo
from penstock.planner import events as planning
from penstock.planner.events import Ticked
from penstock.planner.forecast.trace_interval import TraceInterval
from penstock.planner.performance.speed_sources import KnownSpeeds, Profile
from penstock.planner.planner import Planner
from penstock.planner.plugins.plugin_registry import PlannerPlugin
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import PlannerSettings
from penstock.planner.settings_plugins import PluginSettings

KIND = "planner"

_EVENTS = (
    *(
        Woken,
        planning.Observed,
        planning.ObserveFailed,
        planning.PluginAnswered,
        planning.Scaled,
        planning.PluginRegistered,
    ),
    *(planning.PluginAlive, planning.PluginLeft, planning.Benchmarked, planning.LimitsChanged),
)
_decode_event = msgspec.msgpack.Decoder(reduce(or_, _EVENTS)).decode


def planner_book(planner: Planner, inputs: PolicyInputs) -> MachineBook:
    """Return what writes a planner's state and events for a journal.

    Args:
        inputs: what its policy was given beside the settings.
    """
    given = {
        "known": {
            model: {
                role: {
                    "metrics": {name: dict(points) for name, points in known.metrics.items()},
                    "profile": known.profile,
                    "why_not": dict(known.why_not),
                }
                for role, known in roles.items()
            }
            for model, roles in inputs.speeds.items()
        },
        "slo": msgspec.to_builtins(inputs.slo),
        "traces": {
            model: [[row.arrival, row.shape.isl, row.shape.osl] for row in rows]
            for model, rows in inputs.traces.items()
        },
    }

    def made() -> Snapshot:
        plain = {name: getattr(planner.settings, name) for name in PlannerSettings.__struct_fields__}
        # External plugins are not called again: their answers are in the journal. Their settings may hold tokens.
        plugins = planner.settings.plugins
        modules = {id: entry for id, entry in plugins.use.items() if entry.module}
        plain["plugins"] = PluginSettings(deadline=plugins.deadline, heartbeat=plugins.heartbeat, use=modules)
        return {"settings": msgspec.to_builtins(plain), "inputs": given}

    return MachineBook(planner, KIND, placed_by, made=made)


def placed_by(effects: Sequence[Effect]) -> list[tuple[str, int, str, int]]:
    """Return the outcome of each tick: (pool, desired replicas, outcome, tick)."""
    return [
        (name, pool.target, effect.record.outcome, effect.record.tick)
        for effect in effects
        if isinstance(effect, Ticked)
        for name, pool in effect.record.pools.items()
    ]


def event_of(record: Record) -> Event:
    """Return a record's event in the planner's type.

    Raises:
        ValueError: it is no event of a planner.
    """
    event: Event = _decode_event(record.event)
    return event


def settings_of(header: Header) -> PlannerSettings:
    """Return the settings that a header was written with.

    Raises:
        ValueError: they are not of this version.
    """
    return msgspec.convert(header.made["settings"], PlannerSettings)


def planner_of(header: Header, own: Iterable[PlannerPlugin] = ()) -> Planner:
    """Return the planner that a header describes.

    Args:
        own: the operator's plugins of its process.
    Raises:
        ValueError: the header's state is not of a planner of this version.
        ConfigError: a library that its policy needs is missing.
    """
    settings = settings_of(header)
    made: dict[str, Any] = header.made["inputs"]
    try:
        known = {
            model: {_role(role): _known_speeds(k) for role, k in roles.items()}
            for model, roles in made["known"].items()
        }
        traces = {
            model: [TraceInterval(at, RequestShape(isl, osl)) for at, isl, osl in rows]
            for model, rows in made["traces"].items()
        }
        inputs = PolicyInputs(slo=msgspec.convert(made["slo"], Slo), speeds=known, traces=traces)
        planner = Planner(settings, [*plugins_of(settings, inputs), *own])
        planner.restore(header.snapshot)
    except (KeyError, TypeError, InvariantError) as error:
        raise ValueError(f"the header's state does not belong to this version: {error!r}") from error
    return planner


def _role(name: str) -> Role:
    role: Role = msgspec.convert(name, Role)
    return role


def _known_speeds(made: dict[str, Any]) -> KnownSpeeds:
    profile = None if made["profile"] is None else msgspec.convert(made["profile"], Profile)
    return KnownSpeeds(metrics=made["metrics"], profile=profile, why_not=made["why_not"])
