"""Interfaces and their addresses, names and what they resolve to, InfiniBand's ports."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from parallel3d.doctor.facts import Interface

__all__ = ["addresses_of", "read_infiniband", "read_interfaces", "try_store"]

_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS of linux/sockios.h
_UP_AND_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING


def read_interfaces() -> tuple[Interface, ...]:
    """Those of this network namespace, in the kernel's order; a bond's and bridge's members too."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return ()
    six = _addresses_of_version_6()
    return tuple(
        Interface(name, _is_up(name), (*_address(name), *six.get(name, [])), _speed(name))
        for name in names
    )


def _ask(name: str, what: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, what, struct.pack("256s", name[:15].encode()))


def _is_up(name: str) -> bool:
    try:
        (flags,) = struct.unpack("H", _ask(name, _GET_FLAGS)[16:18])
    except OSError:
        return False
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def _address(name: str) -> list[str]:
    """Its first address of version 4."""
    try:
        return [socket.inet_ntoa(_ask(name, _GET_ADDRESS)[20:24])]
    except OSError:
        return []


def _addresses_of_version_6() -> dict[str, list[str]]:
    """Interface -> addresses of version 6, without those that hold on one link only."""
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        raw, _, _, scope, _, name = line.split()
        if scope != "20":
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw))
            found.setdefault(name, []).append(address)
    return found


def _speed(name: str) -> int:
    try:
        return max(int(Path(f"/sys/class/net/{name}/speed").read_text()), 0)
    except (OSError, ValueError):
        return 0


def read_infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Port -> its state, of InfiniBand and RoCE: ``mlx5_0/1`` -> ``ACTIVE``."""
    found = {}
    for state in sorted(root.glob("*/ports/*/state")):
        port = f"{state.parents[2].name}/{state.parent.name}"
        try:
            found[port] = state.read_text().partition(":")[2].strip()
        except OSError:
            found[port] = "unknown"
    return found


def addresses_of(name: str) -> tuple[tuple[str, ...], str]:
    """(the addresses a name resolves to, "") or ((), why it doesn't)."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), ""


def try_store(address: str, port: int, seconds: float) -> str:
    """Connects to the store as a rank would; why it can't, "" if it can."""
    try:
        with socket.create_connection((address, port), seconds):
            return ""
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return f"{address}:{port}: {why}"
