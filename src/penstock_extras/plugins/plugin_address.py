"""Plugin addresses: which endpoints of plugins and their registry are allowed, and where TLS is required."""

import ipaddress
import os
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.adapters.listen_address import listen_hint
from penstock.kernel.errors import ConfigError, write_hint
from penstock.planner.settings_plugins import MESSAGE_MAX, PluginSettings
from penstock_extras.plugins.protobuf_messages import need_grpc


class PluginAddress(NamedTuple):
    """``target``: as gRPC takes it; ``near``: a socket file, or loopback."""

    target: str
    tls: bool
    near: bool


def address_of(endpoint: str) -> PluginAddress:
    """Read ``unix:///PATH``, ``grpc://HOST:PORT``, ``grpcs://HOST:PORT`` or ``HOST:PORT``.

    Raises:
        ValueError: it is none of them; the message says what is accepted.
    """
    if endpoint.startswith("unix://"):
        path = endpoint.removeprefix("unix://")
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"{endpoint!r} has no absolute path; it takes unix:///PATH")
        return PluginAddress(endpoint, tls=False, near=True)
    text = endpoint if "://" in endpoint else f"grpc://{endpoint}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{endpoint!r}: {error}") from None
    extra = parts.path or parts.query or parts.fragment or parts.username is not None
    if parts.scheme not in ("grpc", "grpcs") or not host or port is None or extra:
        raise ValueError(
            f"{endpoint!r} is not an address; it takes unix:///PATH, grpc://HOST:PORT or grpcs://HOST:PORT"
        )
    shown = f"[{host}]" if ":" in host else host
    return PluginAddress(f"{shown}:{port}", tls=parts.scheme == "grpcs", near=_is_loopback(host))


def check_reachable(address: PluginAddress, settings: PluginSettings) -> None:
    """Raise ValueError where a plugin at that address must not be called: its messages could be read, and forged."""
    if not (address.near or address.tls or settings.insecure):
        raise ValueError(f"{address.target} is another machine, without TLS; it takes grpcs://, or a socket file")


def channel(address: PluginAddress, settings: PluginSettings) -> Any:
    """Open a channel to a plugin; it connects when it is first used."""
    grpc = need_grpc()
    options = [
        ("grpc.max_receive_message_length", MESSAGE_MAX),
        ("grpc.max_send_message_length", MESSAGE_MAX),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_reconnect_backoff_ms", 1000),  # reach a restarted plugin again soon
    ]
    if not address.tls:
        return grpc.aio.insecure_channel(address.target, options=options)
    ca, key, cert = (_read_credential(path) for path in (settings.ca, settings.key, settings.cert))
    credentials = grpc.ssl_channel_credentials(ca, key, cert) if cert and key else grpc.ssl_channel_credentials(ca)
    return grpc.aio.secure_channel(address.target, credentials, options=options)


def bind(server: Any, listen: str, settings: PluginSettings) -> str:
    """Bind a server to an address; return the endpoint that others call.

    Raises:
        ConfigError: the address is invalid, is taken, or is open to others without TLS.
    """
    grpc = need_grpc()
    try:
        address = address_of(listen)
    except ValueError as error:
        raise ConfigError(f"planner.plugins.listen: {error}") from None
    tls = settings.cert is not None
    if tls and settings.key is None:
        raise ConfigError("planner.plugins.cert is set and planner.plugins.key is not", hint="set both, or none")
    if not (address.near or tls or settings.insecure):
        raise ConfigError(
            f"planner.plugins.listen is {listen}, which other machines reach, and there is no TLS",
            hint="set planner.plugins.cert and .key, or listen on unix:///PATH or 127.0.0.1:PORT",
        )
    unix = listen.startswith("unix://")
    if unix:
        Path(listen.removeprefix("unix://")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    choose = "choose another address"
    before = os.umask(0o177) if unix else None  # only this user has access to the socket file, from its first moment
    try:
        if tls and not unix:
            pair = [(_read_credential(settings.key), _read_credential(settings.cert))]
            credentials = grpc.ssl_server_credentials(pair, _read_credential(settings.ca), settings.ca is not None)
            port = server.add_secure_port(address.target, credentials)
        else:
            port = server.add_insecure_port(address.target)
    except (RuntimeError, OSError) as error:
        hint = write_hint(error, choose) if isinstance(error, OSError) else listen_hint(address.target, choose)
        raise ConfigError(f"nobody can listen on {listen}: {error}", hint=hint) from error
    finally:
        if before is not None:
            os.umask(before)
    if unix:
        return listen
    return f"{'grpcs' if tls else 'grpc'}://{address.target.rpartition(':')[0]}:{port}"


def _read_credential(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}", hint="see planner.plugins.cert, .key, .ca"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
