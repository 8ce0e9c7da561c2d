"""Knobs of the HTTP frontend, each once, with unit, range, default and what it trades.

They are here and not in `penstock.frontend` because config may look only at pure rooms; the frontend imports them.
"""

from typing import Annotated

from penstock.kernel.settings import Knob, Settings

PROXIED_ROUTES = (
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/classify",
    "/v1/pooling",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
)


class LimitSettings(Settings, frozen=True, kw_only=True):
    """What a client may ask for."""

    body_max: Annotated[
        int, Knob("Largest request body; a larger one is refused with 413 before it is read.", unit="bytes", gt=0)
    ] = 32 * 1024 * 1024
    prompt_max: Annotated[
        int | None,
        Knob(
            "Longest prompt; a longer one is refused with 400. Unset leaves it to the engine's own limit.",
            unit="tokens",
            gt=0,
            live=True,
        ),
    ] = None
    inflight_max: Annotated[
        int,
        Knob(
            "Most requests that one frontend process holds; the next is refused with 429, and higher costs memory.",
            unit="requests",
            gt=0,
            live=True,
        ),
    ] = 4096
    rate: Annotated[
        float | None,
        Knob(
            "Requests per second that one API key may send on average; unset is no limit.", unit="1/s", gt=0, live=True
        ),
    ] = None
    burst: Annotated[
        int,
        Knob(
            "Requests that one API key may send at once above its rate; higher lets spikes through.",
            unit="count",
            ge=1,
            live=True,
        ),
    ] = 32


class SecuritySettings(Settings, frozen=True, kw_only=True):
    """Who may call, and over which transport."""

    api_keys: Annotated[
        tuple[str, ...],
        Knob("Keys that clients send as 'Authorization: Bearer KEY'; none switches the check off.", secret=True),
    ] = ()
    admin_keys: Annotated[
        tuple[str, ...],
        Knob("Keys for /admin, /ui and /clear_kv_blocks; none allows them to callers on loopback only.", secret=True),
    ] = ()
    insecure: Annotated[
        bool,
        Knob("Bind an address other than loopback without an API key. Any client that reaches it can use the engines."),
    ] = False
    tls_cert: Annotated[str | None, Knob("Path of a PEM certificate chain; with tls_key it switches HTTPS on.")] = None
    tls_key: Annotated[str | None, Knob("Path of the PEM private key that belongs to tls_cert.")] = None


class TokenizeSettings(Settings, frozen=True, kw_only=True):
    """Turning prompts into tokens, off the event loop."""

    threads: Annotated[
        int,
        Knob("Threads that tokenise; more help long prompts and take CPU from streaming.", unit="count", ge=1, le=64),
    ] = 2
    cache_bytes: Annotated[int, Knob("Most memory for those parts; the longest unused go.", unit="bytes", ge=0)] = (
        256 * 1024 * 1024
    )


class UpstreamSettings(Settings, frozen=True, kw_only=True):
    """Waiting for engines."""

    connect_timeout: Annotated[
        float, Knob("Longest wait for a connection to an engine; shorter finds dead ones sooner.", unit="s", gt=0)
    ] = 5.0
    first_byte_timeout: Annotated[
        float,
        Knob(
            "Longest wait for the first byte of an engine's answer, its own queue included.", unit="s", gt=0, live=True
        ),
    ] = 300.0
    stall_timeout: Annotated[
        float,
        Knob("Longest silence inside an answer before the attempt counts as failed.", unit="s", gt=0, live=True),
    ] = 60.0


class FrontendSettings(Settings, frozen=True, kw_only=True):
    """The HTTP endpoint."""

    host: Annotated[
        str, Knob("Address to listen on; an address other than loopback needs security.api_keys or security.insecure.")
    ] = "127.0.0.1"
    port: Annotated[int, Knob("Port to listen on; 0 lets the system choose.", ge=0, le=65535)] = 8000
    admin_port: Annotated[
        int | None,
        Knob("Own loopback port for /admin, /ui and /clear_kv_blocks; unset serves them on port.", ge=0, le=65535),
    ] = None
    processes: Annotated[
        int,
        Knob(
            "Frontend processes that share the port (SO_REUSEPORT); each holds its own index, so memory grows with it.",
            unit="count",
            ge=1,
            le=64,
        ),
    ] = 1
    limits: LimitSettings = LimitSettings()
    security: SecuritySettings = SecuritySettings()
    tokenize: TokenizeSettings = TokenizeSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    proxied_routes: Annotated[
        tuple[str, ...],
        Knob("Routes under /v1 that are passed to the least loaded engine as they are; others are 404."),
    ] = PROXIED_ROUTES
    otlp_endpoint: Annotated[
        str | None, Knob("URL that receives OTLP spans over HTTP; unset sends none. Needs the extra penstock[otel].")
    ] = None
