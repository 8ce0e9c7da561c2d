"""Filter tenant-label: workers that one tenant has to itself."""

from collections.abc import Mapping

from penstock.router.selection.router_plugins import PluginCandidates, PluginRequest


class TenantLabel:
    """Keeps workers whose label names a tenant for that tenant's requests.

    Args:
        label: of the workers' cards.
    """

    def __init__(self, label: str = "tenant") -> None:
        self._label = label

    def exclude(self, request: PluginRequest, candidates: PluginCandidates) -> Mapping[int, str]:
        owners = [card.labels.get(self._label) for card in candidates.cards]
        return {
            place: f"is for the tenant {owner}"
            for place, owner in enumerate(owners)
            if owner is not None and owner != request.tenant
        }
