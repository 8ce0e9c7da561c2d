"""Applications of a frontend: the public routes and the admin routes, over one shared service."""

from functools import partial

from aiohttp import web

from penstock.frontend.admin import metrics_route, page_routes
from penstock.frontend.admin.admin_api import ADMIN_ROUTES
from penstock.frontend.http.middleware import for_admins, give_back, mark_response, outermost, with_key
from penstock.frontend.http.request_context import GATE, expect_continue
from penstock.frontend.http.request_gate import Handler as Routed
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
    app.router.add_get("/", page_routes.home)
    app.router.add_get("/ui", for_admins(page_routes.page))
    app.router.add_get("/ui/{file}", for_admins(page_routes.file))
    for route in ADMIN_ROUTES:
        add = app.router.add_get if route.method == "GET" else app.router.add_post
        add(route.path, for_admins(route.handler))
