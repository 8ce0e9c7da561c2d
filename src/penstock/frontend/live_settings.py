"""Live settings: applies changed knobs to a serving frontend process, rebuilding only what depends on a knob."""

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend import logs
from penstock.frontend.http.api_keys import KeyRates
from penstock.frontend.service import Service


def tune(service: Service, settings: ClusterSettings) -> None:
    """Use other settings from now on; running requests keep the decisions made for them."""
    before, service.settings = service.settings, settings
    limits = settings.frontend.limits
    if (limits.rate, limits.burst) != (before.frontend.limits.rate, before.frontend.limits.burst):
        service.rates = KeyRates(limits.rate, limits.burst)
    service.track_output = settings.router.track_output
    if settings.logs.level != before.logs.level:
        logs.set_level(settings.logs.level)
