"""Picker process: a frontend process that also listens for a gateway in front."""

import sys
from collections.abc import Sequence

from penstock.frontend import frontend_process
from penstock.frontend.frontend_process import Listener
from penstock.frontend.service import Service
from penstock.kernel.errors import ConfigError
from penstock_kubernetes.picker.picker import Picker


def listener(service: Service) -> Listener:
    """Make the listener for the gateway that the settings name.

    Raises:
        ConfigError: the settings ask for what no gateway can do.
    """
    settings = service.settings
    if settings.router.hedge.after is not None:
        raise ConfigError(
            "router.hedge.after sends a request to a second worker, which a gateway can't do",
            hint="unset router.hedge.after or picker.kind",
        )
    if settings.picker.kind in ("nginx", "haproxy"):
        from penstock_kubernetes.picker.gateway_listener import GatewayListener

        return GatewayListener(Picker(service), settings.picker.kind)
    try:
        from penstock_kubernetes.picker.ext_proc_listener import ExtProcListener
    except ModuleNotFoundError as error:
        raise ConfigError(f"picker.kind=envoy needs {error.name}", hint="pip install 'penstock[picker]'") from error
    return ExtProcListener(Picker(service))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one picker process; return the exit status."""
    return frontend_process.main(argv, listener)


if __name__ == "__main__":
    sys.exit(main())
