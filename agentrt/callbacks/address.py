"""Which addresses callbacks may go to. Pure but for `resolve`.

Who starts a run chooses the URL, so it must not lead to what only this host can reach: loopback, private networks, the
cloud's metadata. A name is resolved once, every address it has is checked, and the connection goes to the one that was
checked, so that a name cannot change in between.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

import msgspec

from agentrt.engine.callbacks import URL_CHARS_MAX
from agentrt.errors import ConfigError, InputError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Of one name, that are tried.
ADDRESSES_MAX: Final = 4
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_PORTS: Final = {"http": 80, "https": 443}


class Target(msgspec.Struct, frozen=True):
    """A URL taken apart."""

    scheme: str
    host: str
    port: int


class UnreachableTargetError(Exception):
    """The name cannot be resolved, or leads where callbacks may not go."""


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigError(f"http.callback_networks: {error}", hint="Write 10.0.0.0/8 or fd00::/8") from error


def check_url(url: str, allowed: tuple[Network, ...]) -> Target:
    """What can be said without resolving the name. ``allowed``: networks that callbacks may go to although they are not
    public; only there is plain HTTP taken. Raises InputError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"callback_url is no URL: {error}") from error
    host = parts.hostname or ""
    if len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise InputError(f"callback_url has at most {URL_CHARS_MAX} printable ASCII characters, and no spaces")
    if parts.scheme not in (("https", "http") if allowed else ("https",)):
        raise InputError("callback_url begins with https://", hint="Plain HTTP needs http.callback_networks")
    if not host or parts.username is not None or parts.password is not None or port == 0:
        raise InputError("callback_url needs a host, and no user or password in it")
    target = Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port)
    address = _literal(host)
    if address is not None and not may_reach(address, target.scheme, allowed):
        raise InputError("callback_url leads to an address that is not public", hint="See http.callback_networks")
    return target


def may_reach(address: Address, scheme: str, allowed: tuple[Network, ...]) -> bool:
    """Whether a callback may go there."""
    if any(address in network for network in allowed):
        return True
    return scheme == "https" and all(
        each.is_global and not each.is_multicast and not each.is_reserved for each in (address, *_inside(address))
    )


def _inside(address: Address) -> tuple[ipaddress.IPv4Address, ...]:
    """IPv4 addresses that an IPv6 address stands for on its way."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    found = [address.ipv4_mapped, address.sixtofour]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return tuple(each for each in found if each is not None)


async def resolve(target: Target, allowed: tuple[Network, ...], timeout_s: float) -> list[Address]:
    """The addresses to connect to, the first that answers. Raises UnreachableTargetError: also if only one of several
    is not allowed, for who answers like that wants to be asked again."""
    literal = _literal(target.host)
    if literal is not None:
        addresses = [literal]
    else:
        try:
            async with asyncio.timeout(timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError) as error:
            raise UnreachableTargetError(f"{target.host} cannot be resolved") from error
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    if not addresses or not all(may_reach(each, target.scheme, allowed) for each in addresses):
        raise UnreachableTargetError(f"{target.host} leads to an address that is not public")
    return list(dict.fromkeys(addresses))[:ADDRESSES_MAX]


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
