"""Checks of arguments that several packages take."""

from __future__ import annotations

import ipaddress
import numbers
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST_SECONDS = 10 * 86_400.0
"""Seconds after which every wait ends. The system counts some in milliseconds, in 31 bits: 24 days."""


def require_seconds(option: str, given: Any, *, zero: bool = False) -> float:
    """Return ``given``, or ten days if that is less; raise TypeError or ValueError unless it is a time.

    ``zero`` allows 0, which does not wait.
    """
    if isinstance(given, bool) or not issubclass(type(given), numbers.Real):
        raise TypeError(f"{option} is a number of seconds, got {given!r}; give a large number to wait long")
    if not (0 < given <= threading.TIMEOUT_MAX or (zero and given == 0)):
        kind = "number of seconds from 0 on" if zero else "positive number of seconds"
        raise ValueError(f"{option} is a {kind}, at most {threading.TIMEOUT_MAX:.0f}, got {given!r}")
    return min(float(given), _MOST_SECONDS)  # locks and sockets take no other kind of number


def require_bool(option: str, given: Any) -> bool:
    """Return ``given``; raise ValueError unless it is True or False."""
    if not isinstance(given, bool):
        raise ValueError(f"{option} is True or False, got {given!r}")
    return given


def require_instance(given: Any, error: type[TypeError] = TypeError) -> None:
    """Raise ``error`` if a class was given where an object is needed."""
    if isinstance(given, type):
        raise error(f"{given.__name__} is a class; give an instance: {given.__name__}(...)")


def require_method(given: Any, method: str, wanted: str) -> None:
    """Raise TypeError, which says what is ``wanted``, unless ``given`` is an object with this method."""
    if isinstance(given, type):
        raise TypeError(f"give {wanted}, not the class {given.__name__}")
    if not hasattr(given, method):
        raise TypeError(f"give {wanted}, not an object of type {type(given).__name__}")


def refuse_arguments(owner: object, given: Mapping[str, object], instead: str) -> None:
    """Raise TypeError, which says what to do ``instead``, if there are any arguments in ``given``."""
    if given:
        names = ", ".join(given)
        raise TypeError(f"{type(owner).__name__}() takes no {names}: {instead}")


def require_new_name(cls: type, registry: Mapping[str, type]) -> str:
    """Return the ``name`` of a class; raise ValueError if it has none, or the registry has it already.

    The same class may be defined again, as a notebook does.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"{cls.__name__} needs a class attribute name, such as 'mine/1'")
    former = registry.get(name, cls)
    if former.__qualname__ != cls.__qualname__ or former.__module__ != cls.__module__:
        raise ValueError(f"the name {name!r} of {cls.__name__} is taken by {former.__name__}; choose another")
    return name


def made_by_label(given: Any, registry: Mapping[str, Callable[[], _T]], kind: str) -> _T:
    """Return a new object of the class whose name begins with ``given`` and a slash.

    Raises:
        TypeError: a class was given.
        ValueError: there is none; the message lists what is known of this ``kind``.
    """
    require_instance(given)
    for name, make in registry.items():
        if given == name.partition("/")[0]:
            return make()
    known = ", ".join(sorted(name.partition("/")[0] for name in registry))
    raise ValueError(f"unknown {kind} {given!r} (known {kind}s: {known})")


def enclosing_names(name: str) -> Iterator[str]:
    """Yield a dotted name, then the part of it before each dot, from the last dot to the first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


TOKEN = "WEIGHT_UPDATE_TOKEN"
"""Name of the environment variable that stands for a token that is not given."""


def require_token(token: Any) -> str | None:
    """Return ``token``; raise TypeError or ValueError unless it is None or a string that is not empty."""
    if token is not None and not isinstance(token, str):
        raise TypeError(f"token is a string that both ends share, not {type(token).__name__}")
    if token == "":
        raise ValueError("token is empty: give both ends the same secret, or None")
    return token


def given_token(token: Any) -> str | None:
    """Return ``token`` as :func:`require_token` does, or the environment's; None if there is neither."""
    return require_token(token) or os.environ.get(TOKEN) or None


def require_host(host: Any) -> str | None:
    """Return ``host``; raise TypeError unless it is None or a string."""
    if host is not None and not isinstance(host, str):
        raise TypeError(f"host is a name of this host, such as 'node-1', not {host!r}")
    return host


def require_reachable(address: Any) -> str:
    """Return ``address``; raise TypeError or ValueError unless other machines can connect to it.

    They cannot connect to an address that stands for all interfaces, such as 0.0.0.0. A port is an argument
    of its own.
    """
    if not isinstance(address, str):
        raise TypeError(f"address is a string, such as '10.0.0.5', got {address!r}")
    try:
        wildcard = address == "" or ipaddress.ip_address(address).is_unspecified
    except ValueError:
        if ":" in address:
            raise ValueError(
                f"address={address!r} is no name or address of a machine; leave the port out, or give it as "
                "port="
            ) from None
        return address  # a name
    if wildcard:
        raise ValueError(
            f"address={address!r} stands for all interfaces, and other machines cannot connect to it; give "
            "the address by which they reach this machine, such as '10.0.0.5'"
        )
    return address


def require_local_path(directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if ``directory`` is a URL, from which ``pathlib`` would make a local path."""
    if "://" in os.fspath(directory):
        raise ValueError(
            f"directory={os.fspath(directory)!r} is a URL; give a directory of a file system that all "
            "processes share, or use ObjectStoreWeightSyncScheme for an object store"
        )


def whole_number(value: Any, name: str, least: int, most: int | None = None) -> int:
    """Return the value of the argument ``name``; raise ValueError if it is no integer in that range."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is an integer {limits}, not {value!r:.40}")
    return int(value)


def port_number(value: Any) -> int:
    """Return the value of the argument ``port``; raise ValueError if it is not the number of a port."""
    return whole_number(value, "port", least=0, most=65535)
