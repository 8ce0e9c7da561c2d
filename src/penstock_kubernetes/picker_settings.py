"""Knobs of the picker, which chooses engines for a gateway in front that carries the requests itself."""

from typing import Annotated, Literal

from penstock.kernel.settings import Knob, Settings

GatewayKind = Literal["envoy", "nginx", "haproxy"]


class PickerSettings(Settings, frozen=True, kw_only=True):
    """Choosing engines for requests that a gateway carries."""

    kind: Annotated[
        GatewayKind | None,
        Knob(
            "Gateway in front for which the frontends choose engines too: envoy asks by ext_proc over gRPC, nginx and "
            "haproxy over HTTP; unset chooses only for the frontends' own requests."
        ),
    ] = None
    listen_port: Annotated[
        int,
        Knob(
            "Port on frontend.host at which the gateway asks; the second frontend process has the next one, and so on. "
            "0 lets the system choose.",
            ge=0,
            le=65535,
        ),
    ] = 9002
    fallbacks: Annotated[
        int,
        Knob(
            "Endpoints that a gateway may try where it can't reach the chosen one, next best first; 0 for an Envoy "
            "whose cluster is of type ORIGINAL_DST, which takes no list.",
            unit="count",
            ge=0,
            le=8,
        ),
    ] = 2
    tls: Annotated[
        bool,
        Knob(
            "Let Envoy ask over TLS, with the certificate of frontend.security or else one that is made at each start; "
            "off costs less CPU, for an Envoy on the same host."
        ),
    ] = True
    folder: Annotated[
        str | None,
        Knob(
            "Folder of the sockets at which nginx or HAProxy ask and report, and of the workers' file; "
            "unset is picker-PORT below runs.dir, by frontend.port."
        ),
    ] = None
