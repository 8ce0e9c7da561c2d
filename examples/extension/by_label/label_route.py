"""Route /by-label/LABEL: how many workers of each value of a label there are."""

from collections import Counter
from typing import Any

from aiohttp import web

from penstock.frontend.extension_routes import FrontendRoute, FrontendRoutes
from penstock.frontend.service import Service


def routes(service: Service, handlers: Any) -> FrontendRoutes:
    """Return the route of one frontend."""

    async def by_label(request: web.Request) -> web.Response:
        label = request.match_info["label"]
        values = Counter(card.labels.get(label, "") for card in service.cluster.cards())
        return web.json_response({"label": label, "workers": dict(sorted(values.items()))})

    return FrontendRoutes([FrontendRoute("GET", "/by-label/{label}", by_label)])
