"""Jobs of engines as an extension of the frontend: videos, images, and files that lie at an engine."""

from collections.abc import Callable, Mapping
from functools import partial

from penstock.frontend.extension_routes import FrontendRoute, FrontendRoutes
from penstock.frontend.http.request_gate import Handler as Routed
from penstock.frontend.prompt.request_body import IMAGES, JOB_PATHS
from penstock.frontend.service import Service
from penstock_extras.jobs import engine_files, job_making, job_routes
from penstock_extras.jobs.engine_jobs import jobs_of

MADE_AT_ONCE = ("edits", "generations", "variations")
"""Words that are no id of an image: routes of POST have them."""


def routes(service: Service, handlers: Callable[[], Mapping[str, Routed]]) -> FrontendRoutes:
    """Return the routes; those that begin a job are sent to engines as all requests are."""
    jobs_of(service)  # bodies of other requests may name an engine's files
    proxied = service.settings.frontend.proxied_routes
    posts = {path: partial(make, service) for path, make in job_making.MAKERS.items() if path in (*JOB_PATHS, *proxied)}
    plain = [
        FrontendRoute(method, _apart(path), handler, timeout=None)
        for method, path, handler in (*job_routes.ROUTES, *engine_files.ROUTES)
    ]
    return FrontendRoutes(plain, posts)


def _apart(path: str) -> str:
    if not path.startswith(f"{IMAGES}/"):
        return path
    return path.replace("{job}", f"{{job:(?!{'|'.join(f'{word}$' for word in MADE_AT_ONCE)})[^{{}}/]+}}")
