"""Which route goes where? The public application and the admin one, over one shared service."""

from aiohttp import web

from penstock.frontend import (
    admin,
    completions,
    models,
    openapi,
    operate,
    over_time,
    planning,
    proxy,
    scrape,
    tuning,
    ui,
)
from penstock.frontend.context import SERVICE, expect_continue
from penstock.frontend.entry import Handler as Routed
from penstock.frontend.middleware import Handler, for_admins, mark_response, outermost, with_key
from penstock.frontend.plain import routed
from penstock.frontend.service import Service

LINGER = 1.0
"""Seconds that the rest of a refused body is read and thrown away, so that the client gets to see the answer."""


def routed_handlers(service: Service) -> dict[str, Routed]:
    """Return what serves a POST to each path whose requests go to engines."""
    return {
        **dict.fromkeys(service.settings.frontend.proxied_routes, proxy.proxied),
        "/v1/chat/completions": completions.chat_completions,
        "/v1/completions": completions.text_completions,
    }


def public_app(service: Service, *, with_admin: bool) -> web.Application:
    """Make the application that clients see.

    Args:
        with_admin: serve the admin routes here as well; false where they have a port of their own.
    """
    app = _bare(service)
    post, get = app.router.add_post, app.router.add_get
    for path, handler in routed_handlers(service).items():
        post(path, routed(handler), expect_handler=expect_continue)
    get("/v1/models", with_key(models.list_models))
    get("/v1/models/{model:.+}", with_key(models.one_model))
    get("/health", models.health)
    get("/live", models.live)
    get("/metrics", scrape.metrics)
    get("/openapi.json", openapi.description)
    if with_admin:
        _add_admin(app)
    app.router.add_route("*", "/v1/{rest:.*}", with_key(proxy.not_allowed), expect_handler=expect_continue)
    return app


def admin_app(service: Service) -> web.Application:
    """Make the application of the admin port: only what administrators use, and what machines ask of a process."""
    app = _bare(service)
    _add_admin(app)
    app.router.add_get("/health", models.health)
    app.router.add_get("/live", models.live)
    app.router.add_get("/metrics", scrape.metrics)
    app.router.add_get("/openapi.json", openapi.description)
    return app


def _bare(service: Service) -> web.Application:
    app = web.Application(middlewares=[outermost], client_max_size=service.settings.frontend.limits.body_max)
    app[SERVICE] = service
    app.on_response_prepare.append(mark_response)
    return app


def _add_admin(app: web.Application) -> None:
    def get(path: str, handler: Handler) -> None:
        app.router.add_get(path, for_admins(handler))

    get("/ui", ui.page)
    get("/ui/{file}", ui.file)
    get("/admin/status", admin.status)
    get("/admin/explain/{request}", admin.explain)
    get("/admin/requests", admin.requests)
    get("/admin/decisions", admin.decisions)
    get("/admin/timeline", over_time.timeline)
    get("/admin/timeline/workers", over_time.workers)
    get("/admin/timeline/workers/{worker}", over_time.worker)
    get("/admin/planner/seen", planning.seen)
    get("/admin/planner/decisions", planning.decisions)
    get("/admin/desired", operate.desired)
    app.router.add_post("/admin/scale", for_admins(operate.scale))
    app.router.add_post("/admin/drain", for_admins(operate.drain))
    app.router.add_post("/admin/flip", for_admins(operate.flip))
    app.router.add_post("/admin/restart", for_admins(operate.restart))
    get("/admin/settings", tuning.settings)
    app.router.add_post("/admin/set", for_admins(tuning.set_values))
    app.router.add_post("/clear_kv_blocks", for_admins(admin.clear_kv_blocks))
