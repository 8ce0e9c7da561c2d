"""Knobs of the HTTP frontend, each once, with unit, range, default and what it trades.

They are here and not in `penstock.frontend` because config may look only at pure rooms; the frontend imports them.
"""

from typing import Annotated

from penstock.config.settings.tenant_settings import JwtSettings
from penstock.kernel.settings import Knob, Settings

PROXIED_ROUTES = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/tokenize",
    "/tokenize",
    "/v1/detokenize",
    "/detokenize",
    "/v1/classify",
    "/classify",
    "/v1/pooling",
    "/pooling",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
)


ROOT_ROUTES = frozenset(route for route in PROXIED_ROUTES if not route.startswith("/v1/"))
"""Routes of engines that are not under /v1 and may be passed on: no other can hide one of ours."""


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
            "Requests per second that one API key may send on average; unset means no limit.",
            unit="1/s",
            gt=0,
            live=True,
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
    pins: Annotated[
        bool | None,
        Knob(
            "Let clients that are no tenant's choose the worker or rank of a request, as a gateway before us does; "
            "unset lets those of this machine where no key is needed."
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Knob(
            "Origins whose pages may call the API from a browser, such as https://app.example.com; * is any. Never the "
            "admin routes."
        ),
    ] = ()
    tls_cert: Annotated[str | None, Knob("Path of a PEM certificate chain; with tls_key it switches HTTPS on.")] = None
    tls_key: Annotated[str | None, Knob("Path of the PEM private key that belongs to tls_cert.")] = None
    jwt: JwtSettings = JwtSettings()


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
    quiet_timeout: Annotated[
        float,
        Knob(
            "Silence after which an engine that is gone, or does not answer its health check, is no longer believed to "
            "work on what it was sent: its requests go elsewhere where another engine is left.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = 5.0


class MediaSettings(Settings, frozen=True, kw_only=True):
    """Images, sounds and videos in chats: fetched here, once, and sent to the engines as data."""

    allowed_hosts: Annotated[
        tuple[str, ...],
        Knob(
            "Hosts whose URLs are fetched, such as images.example.org, .example.org for all below it, or * for any "
            "public one; none refuses every URL, so that clients send data URLs."
        ),
    ] = ()
    private_hosts: Annotated[
        tuple[str, ...],
        Knob(
            "Hosts whose URLs are fetched although their address is private or this machine's, by their exact names: "
            "whoever may ask a model may read any image there. Link-local addresses are refused all the same."
        ),
    ] = ()
    bytes_max: Annotated[
        int,
        Knob(
            "Most bytes of media in one request, fetched or as data URLs; more are refused with 413.",
            unit="bytes",
            gt=0,
        ),
    ] = 64 * 1024 * 1024
    timeout: Annotated[
        float, Knob("Longest that the fetch of one URL may take, its redirects included.", unit="s", gt=0)
    ] = 10.0
    cache_bytes: Annotated[
        int,
        Knob("Memory for fetched media, so that a URL is not fetched again; 0 keeps none.", unit="bytes", ge=0),
    ] = 256 * 1024 * 1024


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
    grpc_port: Annotated[
        int | None,
        Knob(
            "Port on frontend.host of the Open Inference Protocol (KServe v2) over gRPC; unset serves none, 0 lets the "
            "system choose. Needs the extra penstock[plugins].",
            ge=0,
            le=65535,
        ),
    ] = None
    limits: LimitSettings = LimitSettings()
    security: SecuritySettings = SecuritySettings()
    tokenize: TokenizeSettings = TokenizeSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    media: MediaSettings = MediaSettings()
    proxied_routes: Annotated[
        tuple[str, ...],
        Knob("Routes that are passed to the least loaded engine as they are; others under /v1 are 404."),
    ] = PROXIED_ROUTES
    batch_folder: Annotated[
        str | None,
        Knob("Folder of files and batches, which all frontends of the cluster share; unset is `batches` in the run's."),
    ] = None
    otlp_endpoint: Annotated[
        str | None, Knob("URL that receives OTLP spans over HTTP; unset sends none. Needs the extra penstock[otel].")
    ] = None
