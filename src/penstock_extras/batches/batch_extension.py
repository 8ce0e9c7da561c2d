"""Files and batches as an extension of the frontend: their routes, their folder and the runner of idle time."""

from collections.abc import Callable, Mapping
from pathlib import Path

from aiohttp import web

from penstock.frontend.extension_routes import FrontendRoute, FrontendRoutes
from penstock.frontend.http.request_gate import Handler as Routed
from penstock.frontend.prompt.request_body import IMAGES_MADE, JOB_PATHS, TRANSLATED
from penstock.frontend.service import Service
from penstock_extras.batches import batch_routes, file_routes
from penstock_extras.batches.batch_claim import BatchClaim
from penstock_extras.batches.batch_desk import DESK, BatchDesk
from penstock_extras.batches.batch_folder import BatchFolder
from penstock_extras.batches.batch_runner import BatchRunner
from penstock_extras.jobs import engine_files

FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"})
NO_BATCH = FORMS | {*IMAGES_MADE} | {*TRANSLATED, *JOB_PATHS}
"""Routes that a batch can't use: their bodies are forms, their answers are not JSON, or they have a state."""
ROUTES = (
    FrontendRoute("GET", "/v1/batches", batch_routes.list_batches, timeout=None),
    FrontendRoute("GET", "/v1/batches/{batch}", batch_routes.one_batch, timeout=None),
    FrontendRoute("POST", "/v1/files", file_routes.upload, timeout=None, form=True),
    FrontendRoute("POST", "/v1/batches", batch_routes.create, timeout=None),
    FrontendRoute("POST", "/v1/batches/{batch}/cancel", batch_routes.cancel, timeout=None),
)


def routes(service: Service, handlers: Callable[[], Mapping[str, Routed]]) -> FrontendRoutes:
    """Return the routes; where there is no folder, and in a picker, they say so."""
    desk: BatchDesk | None = None

    def setup(app: web.Application) -> None:
        nonlocal desk
        desk = batch_desk(service, handlers())
        if desk is not None:
            app[DESK] = desk

    async def run() -> None:
        if desk is not None:
            await desk.runner.run()

    return FrontendRoutes(ROUTES, setup=setup, run=run)


def batch_desk(service: Service, handlers: Mapping[str, Routed]) -> BatchDesk | None:
    """Return where this process takes files and batches; None where there is no folder for them."""
    name = service.settings.frontend.batch_folder or (f"{service.run}/batches" if service.run else None)
    if name is None:
        return None
    store, ttl = service.cluster.store, service.settings.discovery.ttl
    claim = None if store is None else BatchClaim(store, service.cluster.name, ttl)
    folder = BatchFolder(Path(name).expanduser())
    endpoints = frozenset(handlers) - NO_BATCH
    return BatchDesk(folder, BatchRunner(service, folder, handlers, claim), endpoints, engine_files.send_to_engine)
