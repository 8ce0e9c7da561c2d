"""Login at a Kubernetes API server: from the pod's own account, or from a kubeconfig and one of its contexts."""

import logging
from typing import TYPE_CHECKING

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
