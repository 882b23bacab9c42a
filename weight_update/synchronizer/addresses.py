"""Checks of the addresses that clients of a synchronizer are told."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "require_reachable"]


def is_loopback(address: str | None) -> bool:
    """Return whether only processes of this machine reach ``address``; None is no address at all."""
    if address is None or address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a name


def require_reachable(address: str) -> None:
    """Raise ValueError for an address that stands for all interfaces: no other machine can connect to it."""
    try:
        wildcard = address == "" or ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return  # a name
    if wildcard:
        raise ValueError(
            f"address={address!r} stands for all interfaces, and other machines cannot connect to it; give "
            "the address by which they reach this machine, such as '10.0.0.5'"
        )
