"""Address guard: which hosts media may be fetched from, and which addresses are never connected to.

A name is resolved once, every address of it is checked, and the connection goes to an address that was checked: a name
server that answers otherwise a moment later (DNS rebinding) changes nothing.
"""

import ipaddress
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from penstock.config.settings.frontend_settings import MediaSettings
from penstock.kernel.errors import ClientError

ANY_HOST = "*"
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Behind a provider's address translation; some clouds have their metadata there."""
_EMBEDDED = (
    (ipaddress.ip_network("64:ff9b::/96"), 0),
    (ipaddress.ip_network("64:ff9b:1::/48"), 0),
    (ipaddress.ip_network("2002::/16"), 80),
    (ipaddress.ip_network("::/96"), 0),
)
"""IPv6 networks whose addresses contain an IPv4 one, and how many bits stand after it: NAT64, 6to4, IPv4-compatible."""

_INSIDE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "fc00::/7", "::1")
)
"""Networks in which a host on the list of private ones may be."""
_METADATA = (ipaddress.ip_address("fd00:ec2::254"),)
"""Addresses there of clouds' metadata; the usual one, 169.254.169.254, is link-local."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedAddress(OSError):
    """A host has an address that media are not fetched from."""


def is_public(address: Address) -> bool:
    """Return whether an address is one of the public internet, also where it stands inside an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.teredo is not None:
            return False
        for network, shift in _EMBEDDED:
            if address in network:
                return is_public(ipaddress.IPv4Address(int(address) >> shift & 0xFFFF_FFFF))
        if address.is_site_local:
            return False
    elif address in _SHARED:
        return False
    return address.is_global and not address.is_multicast


def host_listed(host: str, names: Sequence[str]) -> bool:
    """Return whether a host is one of these names, exactly."""
    return host.lower().rstrip(".") in {name.lower().rstrip(".").strip("[]") for name in names}


def host_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Return whether a host's name is on the list: itself, a parent as ``.example.org``, or ``*`` for any."""
    name = host.lower().rstrip(".")
    return any(
        entry == ANY_HOST or name == entry or (entry.startswith(".") and name.endswith(entry))
        for entry in (item.lower().rstrip(".") for item in allowed)
    )


class GuardedResolver(AbstractResolver):
    """Resolves names to addresses that may be connected to; names and plain addresses alike.

    Args:
        private: hosts that may have a private address or one of this machine; link-local ones (metadata) never.
    """

    def __init__(self, *, private: Sequence[str] = (), resolver: AbstractResolver | None = None) -> None:
        self._private = private
        self._resolver = ThreadedResolver() if resolver is None else resolver

    def permits(self, host: str, text: str) -> bool:
        """Return whether an address of a host may be connected to."""
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if is_public(address):
            return True
        if not host_listed(host, self._private) or address in _METADATA:
            return False
        return any(address in network for network in _INSIDE if network.version == address.version)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return a host's addresses.

        Raises:
            RefusedAddress: one of them is private: a name with both is not to be trusted.
        """
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            if not self.permits(host, each["host"]):
                raise RefusedAddress(f"{host} has an address that is not public")
        return found

    async def close(self) -> None:
        await self._resolver.close()

    def check(self, url: URL) -> None:
        """Refuse a URL whose host is written as an address that may not be connected to: nothing resolves that.

        Raises:
            RefusedAddress: it is.
        """
        host = url.host or ""
        try:
            permitted = self.permits(host, host)
        except ValueError:
            return  # a name
        if not permitted:
            raise RefusedAddress(f"{host} is an address that is not public")


def check_host(host: str | None, settings: MediaSettings, param: str) -> None:
    """Refuse a host that is not on the lists.

    Raises:
        ClientError: 400, with what to do instead.
    """
    if host and (host_allowed(host, settings.allowed_hosts) or host_listed(host, settings.private_hosts)):
        return
    raise ClientError(
        f"{param} is not fetched: frontend.media.allowed_hosts does not list {host!r}",
        param=param,
        code="media_not_fetched",
        hint="list the host there, or send the data itself, as data:TYPE;base64,DATA",
    )
