"""Client of a Kubernetes API server: its login, and requests that are tried again within a bound; failures in words."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from penstock.adapters.seams import StoreUnavailable
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.kernel.errors import ConfigError

if TYPE_CHECKING:
    from lightkube import AsyncClient


FIELD_MANAGER = "penstock"
"""Under which name the API server records what we apply."""


def open_client(settings: KubernetesSettings, *, field_manager: str = FIELD_MANAGER) -> "AsyncClient":
    """Return a client of the API server; no request is sent yet.

    Without ``discovery.kubernetes.context`` it logs in with the account of the pod that we run in, or else as kubectl
    would: KUBECONFIG, then ~/.kube/config. The token of a pod is read anew once the API server refuses the old one.

    Raises:
        ConfigError: there is no login, no such context, or the package lightkube is missing.
    """
    try:
        from lightkube import AsyncClient, KubeConfig
        from lightkube.core.exceptions import ConfigError as LoginError
    except ImportError as error:
        raise ConfigError(
            "Kubernetes needs the package lightkube", hint="pip install 'penstock[kubernetes]'"
        ) from error
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request, each renewal of a lease among them
    try:
        config = KubeConfig.from_env().get(settings.context)
        return AsyncClient(config=config, namespace=settings.namespace, field_manager=field_manager)
    except (LoginError, OSError) as error:
        raise ConfigError(
            f"there is no login at a Kubernetes API server: {error}",
            hint="set KUBECONFIG or discovery.kubernetes.context, or run in a pod with a service account",
        ) from error


T = TypeVar("T")

PAUSES = (0.1, 0.3, 1.0)
"""Seconds before each further try, where the server says no time: it is busy (429), fails (500) or restarts (503)."""
LONGEST_PAUSE = 5.0
"""Seconds that we wait at most where a busy server says how long."""
_AGAIN = (429, 500, 502, 503, 504)


async def ask(call: Callable[[], Awaitable[T]]) -> T:
    """Return what a request of lightkube returns; a server that is busy or fails is asked again a few times.

    A connection that breaks is tried once more: an idle one may have been closed by the server.

    Raises:
        StoreUnavailable: the server can't be reached, stays busy, or refuses this login.
        ApiError: any other refusal, such as 404, 409 and 410; its ``status.code`` says which.
    """
    from httpx2 import HTTPError, HTTPStatusError
    from lightkube import ApiError

    broken = 0
    for pause in (*PAUSES, None):
        try:
            return await call()
        except HTTPStatusError as error:
            code = error.status.code if isinstance(error, ApiError) else error.response.status_code
            if code not in _AGAIN and isinstance(error, ApiError) and code not in (401, 403):
                raise
            if code not in _AGAIN or pause is None:
                raise unavailable(error) from error
            await asyncio.sleep(_pause_of(error, pause))
        except (HTTPError, OSError) as error:
            broken += 1
            if broken > 1 or pause is None:
                raise unavailable(error) from error
    raise AssertionError("the last try returns or raises")


def unavailable(error: Exception) -> StoreUnavailable:
    """Return what is wrong with an API server, and what to do."""
    from httpx2 import HTTPStatusError
    from lightkube import ApiError

    text = str(error).partition("\n")[0] or type(error).__name__
    if not isinstance(error, HTTPStatusError):
        return StoreUnavailable(f"the API server can't be reached: {text}", hint="traffic goes on meanwhile")
    code = error.status.code if isinstance(error, ApiError) else error.response.status_code
    hint = {
        401: "its token or certificate has expired, or is another cluster's: see discovery.kubernetes.context",
        403: "grant that right to the service account: `penstock doctor` lists what is missing",
        404: "are our resources installed? kubectl apply --server-side -f deploy/helm/penstock/files/crds",
        410: "nothing to do: it is read anew",
    }.get(code or 0, "traffic goes on meanwhile")
    return StoreUnavailable(f"the API server refuses ({code}): {text}", hint=hint)


def code_of(error: Exception) -> int:
    """Return the HTTP status of a refusal; 0 where it is none."""
    from httpx2 import HTTPStatusError
    from lightkube import ApiError

    if isinstance(error, ApiError):
        return int(error.status.code or 0)
    return int(error.response.status_code) if isinstance(error, HTTPStatusError) else 0


def _pause_of(error: Exception, usual: float) -> float:
    response = getattr(error, "response", None)
    text = "" if response is None else response.headers.get("retry-after", "")
    return min(LONGEST_PAUSE, float(text)) if text.isdigit() else usual
