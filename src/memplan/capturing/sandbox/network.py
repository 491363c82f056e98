"""Refuses connections that would leave this machine, with the errors of one that is offline."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.sandbox.audit import Check

_WHY = "refused by memplan's sandbox; --allow-network permits it"
_LOCAL_FAMILIES = (socket.AF_UNIX, getattr(socket, "AF_NETLINK", socket.AF_UNIX))


def _is_local_name(host: str) -> bool:
    own = socket.gethostname()
    names = {"", "localhost", "localhost.localdomain", "ip6-localhost", own, own.split(".")[0]}
    return host.rstrip(".").lower() in {n.lower() for n in names}


def _is_own_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether the address is one of this machine's: only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    if address.is_multicast:
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address


def is_local(host: str) -> bool:
    """Whether a host name or numeric address means this machine."""
    address = _parse(host)
    if address is None:
        return _is_local_name(host)
    return address.is_loopback or address.is_unspecified or _is_own_address(address)


def _host_text(host: Any) -> str:
    return os.fsdecode(host) if isinstance(host, (str, bytes)) else ""


def network_checks(on_refused: Callable[[str], None]) -> dict[str, Check]:
    """Audit checks; `on_refused` is told each refused `host:port` (or host, for a name lookup).

    Loopback, this machine's own addresses, Unix and netlink sockets pass. Names of other hosts are
    not looked up, as that alone would send packets.
    """

    def address(args: tuple[Any, ...]) -> None:
        target = args[1]
        if args[0].family in _LOCAL_FAMILIES or not isinstance(target, tuple) or not target:
            return
        host = _host_text(target[0])
        if args[0].family in (socket.AF_INET, socket.AF_INET6) and is_local(host):
            return
        on_refused(":".join(str(part) for part in target[:2]))
        raise OSError(errno.ENETUNREACH, f"{os.strerror(errno.ENETUNREACH)} ({_WHY})")

    def name(args: tuple[Any, ...]) -> None:
        host = _host_text(args[0])
        if _parse(host) is not None or _is_local_name(host):
            return
        port = args[1] if len(args) > 1 and args[1] is not None else ""
        on_refused(f"{host}:{port}".rstrip(":"))
        raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known ({_WHY})")

    looked_up = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
    sent = ("socket.connect", "socket.sendto", "socket.sendmsg")
    return dict.fromkeys(looked_up, name) | dict.fromkeys(sent, address)


def patch_connect_ex(patches: Patches) -> None:
    """Make `connect_ex` return the refusal's number, as it returns every other error."""

    def connect_ex(self: socket.socket, address: Any) -> int:
        try:
            return super(socket.socket, self).connect_ex(address)
        except OSError as problem:
            if isinstance(problem, socket.gaierror) or problem.errno is None:
                raise
            return problem.errno

    patches.set(socket.socket, "connect_ex", connect_ex)
