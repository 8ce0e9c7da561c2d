"""Applications of a frontend: the public routes and the admin routes, over one shared service."""

from functools import partial

from aiohttp import web

from penstock.frontend.admin import (
    admin_routes,
    fleet_routes,
    metrics_route,
    page_routes,
    planner_routes,
    settings_routes,
    timeseries_api,
)
from penstock.frontend.http.middleware import Handler, for_admins, give_back, mark_response, outermost, with_key
from penstock.frontend.http.request_context import GATE, expect_continue
from penstock.frontend.http.request_guard import Handler as Routed
from penstock.frontend.openai import completions, models, passthrough
from penstock.frontend.openapi import openapi
from penstock.frontend.service import SERVICE, Service


def routed_handlers(service: Service) -> dict[str, Routed]:
    """Return the handler of POST for each path whose requests go to engines."""
    return {
        **dict.fromkeys(service.settings.frontend.proxied_routes, partial(passthrough.proxied, service)),
        "/v1/chat/completions": partial(completions.chat_completions, service),
        "/v1/completions": partial(completions.text_completions, service),
    }


def public_app(service: Service, *, with_admin: bool) -> web.Application:
    """Make the public application: every route but those of `routed_handlers`.

    Args:
        with_admin: serve the admin routes here as well; false where they have a port of their own.
    """
    app = _bare(service)
    app.on_response_prepare.append(give_back)
    get = app.router.add_get
    get("/v1/models", with_key(models.list_models))
    get("/v1/models/{model:.+}", with_key(models.one_model))
    get("/health", models.health)
    get("/live", models.live)
    get("/metrics", metrics_route.metrics)
    get("/openapi.json", openapi.description)
    if with_admin:
        _add_admin(app)
    app.router.add_route("*", "/v1/{rest:.*}", with_key(passthrough.not_allowed), expect_handler=expect_continue)
    return app


def admin_app(service: Service) -> web.Application:
    """Make the application of the admin port: only the routes for administrators and for peers and probes."""
    app = _bare(service)
    _add_admin(app)
    app.router.add_get("/health", models.health)
    app.router.add_get("/live", models.live)
    app.router.add_get("/metrics", metrics_route.metrics)
    app.router.add_get("/openapi.json", openapi.description)
    return app


def _bare(service: Service) -> web.Application:
    app = web.Application(middlewares=[outermost], client_max_size=service.settings.frontend.limits.body_max)
    app[SERVICE] = service
    app[GATE] = service.gate
    app.on_response_prepare.append(mark_response)
    return app


def _add_admin(app: web.Application) -> None:
    def get(path: str, handler: Handler) -> None:
        app.router.add_get(path, for_admins(handler))

    app.router.add_get("/", page_routes.home)
    get("/ui", page_routes.page)
    get("/ui/{file}", page_routes.file)
    get("/admin/status", admin_routes.status)
    get("/admin/explain/{request}", admin_routes.explain)
    get("/admin/requests", admin_routes.requests)
    get("/admin/decisions", admin_routes.decisions)
    get("/admin/timeline", timeseries_api.timeline)
    get("/admin/timeline/workers", timeseries_api.workers)
    get("/admin/timeline/workers/{worker}", timeseries_api.worker)
    get("/admin/planner/seen", planner_routes.planner_counters)
    get("/admin/planner/decisions", planner_routes.decisions)
    get("/admin/desired", fleet_routes.desired)
    app.router.add_post("/admin/scale", for_admins(fleet_routes.scale))
    app.router.add_post("/admin/drain", for_admins(fleet_routes.drain))
    app.router.add_post("/admin/flip", for_admins(fleet_routes.flip))
    app.router.add_post("/admin/restart", for_admins(fleet_routes.restart))
    get("/admin/settings", settings_routes.settings)
    app.router.add_post("/admin/set", for_admins(settings_routes.set_values))
    app.router.add_post("/clear_kv_blocks", for_admins(admin_routes.clear_kv_blocks))
