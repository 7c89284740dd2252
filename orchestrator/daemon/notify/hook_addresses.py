"""Decides which addresses a web hook may have: none that serves a machine's credentials. Pure.

An IPv6 address that carries an IPv4 address (mapped, compatible, translated, NAT64, 6to4, Teredo) must also pass the
check of that IPv4 address: a router may deliver it there.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA_SERVICES: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure's wire server
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::23",  # Amazon, credentials of pods
            "fd00:ec2::254",  # Amazon
            "fd20:ce::254",  # Google
        ),
    )
)
"""Addresses of metadata services that are not link-local, unlike those of most."""

_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
_TEREDO: Final = ipaddress.IPv6Network("2001::/32")
_CARRIERS: Final = (
    # The network, and the number of bits after the embedded IPv4 address.
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # IPv4-translated
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (_LOCAL_NAT64, 0),
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
    (_TEREDO, 64),  # its server
)
_IPV4: Final = 0xFFFFFFFF


def is_refused(text: str) -> bool:
    """Whether no hook may be sent to this address, which may carry a zone (`fe80::1%eth0`)."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return any(map(_is_refused, (address, *_carried(address))))


def _is_refused(address: Address) -> bool:
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in METADATA_SERVICES


def _carried(address: Address) -> Iterator[ipaddress.IPv4Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return
    number = int(address)
    if number in (0, 1):  # unspecified, and loopback
        return
    for network, behind in _CARRIERS:
        if address in network:
            yield ipaddress.IPv4Address(number >> behind & _IPV4)
    if address in _LOCAL_NAT64:
        # RFC 6052: with a prefix of 48 bits the address is split around an unused octet.
        yield ipaddress.IPv4Address((number >> 64 & 0xFFFF) << 16 | number >> 40 & 0xFFFF)
    if address in _TEREDO:
        yield ipaddress.IPv4Address(~number & _IPV4)  # its client, inverted
