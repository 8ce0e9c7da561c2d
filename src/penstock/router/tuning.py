"""What does a change of settings mean to a router that runs? The next decision is made by the new ones."""

from penstock.kernel.machine import Nanos, nanos
from penstock.router.core import Core
from penstock.router.events import SettingsChanged


def settings_changed(core: Core, now: Nanos, event: SettingsChanged) -> None:
    """Take other settings. What was decided stays; who waits is ordered anew, and its limit counts from its arrival."""
    settings = core.settings = event.settings
    for model, pool in core.pools.items():
        pool.use(settings)
        core.freed[model] = None
    for request in core.requests.values():
        if request.queued_since is not None:
            core.timer(request.queued_since + nanos(settings.queue.wait_max), "wait", request.id)
    changed = ", ".join(event.keys)
    core.note("settings_changed", f"{event.by or 'somebody'} changed {changed}", keys=list(event.keys), by=event.by)
