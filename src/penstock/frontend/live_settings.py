"""Live settings: applies changed knobs to a serving frontend process, rebuilding only what depends on a knob."""

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend import logs
from penstock.frontend.service import Service


def tune(service: Service, settings: ClusterSettings) -> None:
    """Use other settings from now on; running requests keep the decisions made for them."""
    before, service.settings = service.settings, settings
    service.exchanges.settings = settings
    service.gate.use(settings.frontend)
    service.catalog.use(settings)
    if settings.logs.level != before.logs.level:
        logs.set_level(settings.logs.level)
