"""Applies changed settings to a router that runs: the next decision is made by the new ones."""

from penstock.kernel.machine import Nanos, nanos
from penstock.router.events import SettingsChanged
from penstock.router.router_state import RouterState


def settings_changed(core: RouterState, now: Nanos, event: SettingsChanged) -> None:
    """Take other settings. Decisions stay; queued requests are ordered anew, and their limit counts from queueing."""
    settings = core.settings = event.settings
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
