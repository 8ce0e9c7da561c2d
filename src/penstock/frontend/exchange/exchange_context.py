"""Exchange context: what all request exchanges of one frontend process share."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.exchange.open_attempts import OpenAttempts
from penstock.frontend.exchange.prefill_stages import PrefillStages
from penstock.frontend.prompt.model_catalog import ModelCatalog


@dataclass(slots=True)
class ExchangeContext:
    """Shared by all exchanges.

    Args:
        settings: as they are now.
        first_token: takes the TTFT of an answer, in seconds, when its first token goes out.
    """

    engines: EngineCalls
    cluster: ClusterView
    catalog: ModelCatalog
    metrics: FrontendMetrics
    attempts: OpenAttempts
    stages: PrefillStages
    settings: ClusterSettings
    first_token: Callable[[float], None]
