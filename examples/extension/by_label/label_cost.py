"""Scorer label-cost: a price for each value of a worker's label, such as that of its GPU."""

from collections.abc import Mapping

import numpy as np

from penstock.router.selection.router_plugins import Floats, PluginRequest, PricedCandidates


class LabelCost:
    """Adds what the value of a label costs, for each 1,000 prompt tokens that a worker would have to compute.

    Args:
        label: of the workers' cards; ``costs``: value -> cost; a worker without the label costs nothing more.
    """

    def __init__(self, label: str, costs: Mapping[str, float]) -> None:
        self._label, self._costs = label, costs

    def score(self, request: PluginRequest, candidates: PricedCandidates) -> Floats:
        prices = [self._costs.get(card.labels.get(self._label, ""), 0.0) for card in candidates.cards]
        return np.array(prices) * (request.prompt_tokens - candidates.cached_tokens) / 1000
