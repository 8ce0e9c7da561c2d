"""Applications of a frontend: the public routes and the admin routes, over one shared service."""

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from penstock.frontend.admin import metrics_route, page_routes
from penstock.frontend.admin.admin_api import ADMIN_ROUTES
from penstock.frontend.admin.frontend_peers import give_kv_blocks
from penstock.frontend.cors_policy import CorsPolicy
from penstock.frontend.dialects import messages_routes, responses_routes
from penstock.frontend.dialects.messages_answer import anthropic_error
from penstock.frontend.dialects.response_reach import PEER_RESPONSE, PEER_RESPONSES, give_response, take_responses
from penstock.frontend.extension_routes import FrontendRoutes, add_routes, extension_routes
from penstock.frontend.http.middleware import for_admins, give_back, mark_response, outermost, with_key
from penstock.frontend.http.request_context import GATE, expect_continue
from penstock.frontend.http.request_gate import Handler as Routed
from penstock.frontend.openai import completions, models, passthrough, token_routes
from penstock.frontend.openapi import openapi
from penstock.frontend.prompt.request_body import MESSAGES, MESSAGES_COUNT, RESPONSES, RESPONSES_COUNT
from penstock.frontend.service import SERVICE, Service
from penstock.runtime.kv_events import peer_blocks


def parts_of(service: Service) -> list[FrontendRoutes]:
    """Return what extensions add to a frontend."""
    parts: list[FrontendRoutes] = []
    parts += extension_routes(service, lambda: routed_handlers(service, parts))
    return parts


def routed_handlers(service: Service, parts: Sequence[FrontendRoutes] | None = None) -> dict[str, Routed]:
    """Return the handler of POST for each path whose requests go to engines.

    An operator who lists another API's route among the proxied ones has it from the engines, as they answer it.

    Args:
        parts: of extensions; None asks them.
    """
    service.gate.shapes = {MESSAGES: anthropic_error}
    proxied = service.settings.frontend.proxied_routes
    parts = parts_of(service) if parts is None else parts
    return {
        RESPONSES: partial(responses_routes.create, service),
        RESPONSES_COUNT: partial(responses_routes.count_tokens, service),
        MESSAGES: partial(messages_routes.messages, service),
        MESSAGES_COUNT: partial(messages_routes.count_tokens, service),
        **dict.fromkeys(proxied, partial(passthrough.proxied, service)),
        **{path: partial(handler, service) for path, handler in token_routes.HANDLERS.items() if path in proxied},
        **{path: handler for part in parts for path, handler in part.posts.items()},
        "/v1/chat/completions": partial(completions.complete, "chat_completions", service),
        "/v1/completions": partial(completions.complete, "completions", service),
    }


def public_app(service: Service, *, with_admin: bool, parts: Sequence[FrontendRoutes] | None = None) -> web.Application:
    """Make the public application: every route but those of `routed_handlers`.

    Args:
        with_admin: serve the admin routes here as well; false where they have a port of their own.
        parts: of extensions, which are set up to serve; None asks them for their routes alone.
    """
    app = _bare(service)
    for part in parts or ():
        if part.setup is not None:
            part.setup(app)
    app.on_response_prepare.append(give_back)
    frontend, closed = service.settings.frontend, frozenset(route.path for route in ADMIN_ROUTES)
    if origins := frontend.security.cors_origins:
        service.gate.cors = CorsPolicy(origins, frozenset(frontend.proxied_routes), closed)
    get = app.router.add_get
    get("/v1/models", with_key(models.list_models))
    get("/v1/models/{model:.+}", with_key(models.one_model))
    one_response = f"{RESPONSES}/{_id_segment('id', 'input_tokens')}"
    get(one_response, with_key(responses_routes.retrieve))
    app.router.add_delete(one_response, with_key(responses_routes.delete))
    get(one_response + "/input_items", with_key(responses_routes.input_items))
    app.router.add_post(one_response + "/cancel", with_key(responses_routes.cancel))
    get("/health", models.health)
    get("/live", models.live)
    get("/metrics", metrics_route.metrics)
    get("/openapi.json", openapi.description)
    if with_admin:
        _add_admin(app)
    add_routes(app, parts_of(service) if parts is None else parts)
    for path in ("/v1/{rest:.*}", *frontend.proxied_routes):
        app.router.add_route("*", path, with_key(passthrough.not_allowed), expect_handler=expect_continue)
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


def peers_app(service: Service) -> web.Application:
    """Make the application of the address that the cluster's other processes know."""
    app = admin_app(service)
    app.router.add_route("*", PEER_RESPONSE, for_admins(give_response))
    app.router.add_post(PEER_RESPONSES, for_admins(take_responses))
    app.router.add_get(peer_blocks.PATH.replace("{rank}", "{rank:[0-9]{1,4}}"), for_admins(give_kv_blocks))
    return app


def _id_segment(name: str, *but: str) -> str:
    """Return the part of a route's path that is any id, but for some words, which are routes of POST."""
    return f"{{{name}:(?!{'|'.join(f'{word}$' for word in but)})[^{{}}/]+}}"


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
