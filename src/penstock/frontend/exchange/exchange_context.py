"""Exchange context: what all request exchanges of one frontend process share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.exchange.open_attempts import OpenAttempts
from penstock.frontend.exchange.prefill_stages import PrefillStages
from penstock.frontend.exchange.prefix_warming import PrefixWarming
from penstock.frontend.exchange.upstream_request import RefusedFields
from penstock.frontend.http.bookkeeping import Bookkeeping
from penstock.frontend.prompt.model_catalog import ModelCatalog
from penstock.frontend.prompt.prompt_renderer import PromptRenderer


@dataclass(slots=True)
class ExchangeContext:
    """Shared by all exchanges.

    Args:
        settings: as they are now.
        bookkeeping: takes what is counted of an answer.
        first_token: enters when the first token of an answer went out (of `time.monotonic`), and its TTFT in seconds.
    """

    engines: EngineCalls
    cluster: ClusterView
    catalog: ModelCatalog
    metrics: FrontendMetrics
    bookkeeping: Bookkeeping
    attempts: OpenAttempts
    stages: PrefillStages
    warming: PrefixWarming
    settings: ClusterSettings
    renderer: PromptRenderer
    first_token: Callable[[float, float], None]
    refused_fields: RefusedFields = field(default_factory=RefusedFields)
