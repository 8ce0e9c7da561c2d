"""Scale-out routes: which of vLLM's routes to render, generate and derender a server has, as a label of its card."""

from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.kernel.values import WorkerCard

TOKEN_ROUTES = "token_routes"
"""Label of engines that have some: their names, with spaces between."""
RENDER, GENERATE, DERENDER = "render", "generate", "derender"
ROUTE_PATHS = {
    RENDER: "/v1/chat/completions/render",
    GENERATE: "/inference/v1/generate",
    DERENDER: "/v1/chat/completions/derender",
}


async def token_routes(server: EngineServer) -> dict[str, str]:
    """Return the label for a server's card; empty where it has none of the routes.

    Each is asked with an empty object. vLLM answers 403 for all where they are switched off (``--enable-scale-out``).
    """
    names = []
    for name, path in ROUTE_PATHS.items():
        if not there(await server.post(path, {})):
            if name == RENDER:
                break  # it is of an older version, or has them switched off
            continue
        names.append(name)
    return {TOKEN_ROUTES: " ".join(names)} if names else {}


def there(status: int | None) -> bool:
    """Return whether the status of an answer to an empty object says that there is a route, which misses its fields."""
    return status in (400, 422)


def has_route(card: WorkerCard, name: str) -> bool:
    """Return whether a worker has one of the routes."""
    return name in card.labels.get(TOKEN_ROUTES, "").split()
