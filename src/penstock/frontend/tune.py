"""How does a frontend process take other settings while it serves? Only what was made from a knob is made anew."""

from penstock.config.cluster import ClusterSettings
from penstock.frontend import logs
from penstock.frontend.access import Rates
from penstock.frontend.service import Service


def tune(service: Service, settings: ClusterSettings) -> None:
    """Go on with other settings; requests that run keep what was decided for them."""
    before, service.settings = service.settings, settings
    limits = settings.frontend.limits
    if (limits.rate, limits.burst) != (before.frontend.limits.rate, before.frontend.limits.burst):
        service.rates = Rates(limits.rate, limits.burst)
    service.track_output = settings.router.track_output
    if settings.logs.level != before.logs.level:
        logs.set_level(settings.logs.level)
