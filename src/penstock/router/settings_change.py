"""Applies changed settings to a router that runs, plug-ins included: the next decision is made by the new ones."""

from penstock.kernel.machine import Nanos, nanos
from penstock.router.events import PluginLeftOut, SettingsChanged
from penstock.router.router_state import RouterState


def settings_changed(core: RouterState, now: Nanos, event: SettingsChanged) -> None:
    """Take other settings. Decisions stay; queued requests are ordered anew, and their limit counts from queueing."""
    settings = core.settings = event.settings
    core.use_plugins(settings)
    core.slo = event.slo
    for model, pool in core.pools.items():
        pool.use(settings)
        if pool.fair is not None:
            pool.fair.recount(request for request in core.requests.values() if request.event.model == model)
        core.freed[model] = None
    for request in core.requests.values():
        if request.queued_since is not None:
            core.timer(request.queued_since + nanos(settings.queue.wait_max), "wait", request.id)
    changed = ", ".join(event.keys)
    core.note("settings_changed", f"{event.by or 'an operator'} changed {changed}", keys=list(event.keys), by=event.by)


def plugin_left_out(core: RouterState, now: Nanos, event: PluginLeftOut) -> None:
    """Go on without a plug-in that takes too long, as whoever measures that says."""
    if core.plugins is not None:
        core.plugins.leave_out(event.name, event.reason)
