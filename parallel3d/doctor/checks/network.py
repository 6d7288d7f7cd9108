"""Interfaces and names: what keeps nodes from meeting, or lets them meet over the wrong wire."""

from __future__ import annotations

from ipaddress import ip_address

from parallel3d.doctor.facts import Facts, Interface
from parallel3d.doctor.finding import Result, Seen, Severity, check

__all__ = ["matches"]

AREA = "network"


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def matches(interfaces: tuple[Interface, ...], value: str) -> list[Interface]:
    """Those that NCCL_SOCKET_IFNAME means: prefixes; after ``=`` whole names; after ``^`` all others."""
    rest = value.strip()
    others, rest = rest.startswith("^"), rest.removeprefix("^")
    whole, rest = rest.startswith("="), rest.removeprefix("=")
    given = [name.strip() for name in rest.split(",") if name.strip()]

    def fits(each: Interface) -> bool:
        names = (
            each.name == n.partition(":")[0] if whole else each.name.startswith(n) for n in given
        )
        return any(names) != others

    return [each for each in interfaces if fits(each)]


def _alternatives(facts: Facts) -> str:
    found = [f"{each.name} ({each.addresses[0]})" for each in facts.usable]
    return f"here are {', '.join(found)}" if found else "no other interface has an address"


def _example(facts: Facts, variable: str) -> str:
    name = facts.usable[0].name if facts.usable else "eth0"
    return f"export {variable}={name}"


def _named_for_gloo(facts: Facts) -> list[str]:
    value = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    return [name.strip() for name in value.split(",") if name.strip()]


@check(
    "gloo-interface-missing",
    AREA,
    Severity.error,
    why="gloo can't make a process group: the rank fails at once, and the others wait for it.",
    do="Name one that is up on this node; nodes may need different values.",
)
def gloo_missing(facts: Facts) -> Result:
    ready = {each.name for each in facts.interfaces if each.up and each.addresses}
    wrong = [name for name in _named_for_gloo(facts) if name not in ready]
    if not wrong:
        return None
    text = f"GLOO_SOCKET_IFNAME={','.join(wrong)} is not up, or not there; {_alternatives(facts)}"
    return Seen(text, _example(facts, "GLOO_SOCKET_IFNAME"))


@check(
    "nccl-interface-missing",
    AREA,
    Severity.error,
    why="NCCL finds no interface for its bootstrap and fails, or hangs where others don't.",
    do="Name one that is up on this node (a prefix will do; ^lo,docker excludes).",
)
def nccl_missing(facts: Facts) -> Result:
    value = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    ready = tuple(each for each in facts.interfaces if each.up and each.addresses)
    if not value or matches(ready, value):
        return None
    text = f"NCCL_SOCKET_IFNAME={value} matches no interface that is up; {_alternatives(facts)}"
    return Seen(text, _example(facts, "NCCL_SOCKET_IFNAME"))


@check(
    "interface-of-this-machine",
    AREA,
    Severity.error,
    why="Its address means another machine on each node: nodes can't reach each other through it.",
    do="Name the interface that leads to the other nodes.",
)
def local_interface(facts: Facts) -> Result:
    if not facts.several_nodes:
        return None
    by_name = {each.name: each for each in facts.interfaces}
    named = {"GLOO_SOCKET_IFNAME": [by_name[n] for n in _named_for_gloo(facts) if n in by_name]}
    value = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    named["NCCL_SOCKET_IFNAME"] = matches(facts.interfaces, value) if value else []
    for variable, found in named.items():
        if found and all(each.is_loopback or each.is_of_containers for each in found):
            text = f"{variable}={facts.environment[variable]} is a loopback or container bridge"
            return Seen(f"{text}; {_alternatives(facts)}", _example(facts, variable))
    return None


@check(
    "no-interface",
    AREA,
    Severity.error,
    why="Other nodes can't be reached without one.",
    do="ip -br address; then set up the interface, or start the container in the host's network",
)
def no_interface(facts: Facts) -> Result:
    if facts.several_nodes and facts.interfaces and not facts.usable:
        names = ", ".join(f"{i.name} {'up' if i.up else 'down'}" for i in facts.interfaces)
        return f"no interface but loopback and container bridges is up with an address ({names})"
    return None


@check(
    "several-interfaces",
    AREA,
    Severity.note,
    why="gloo takes the one this node's name resolves to, NCCL the first: not the same, or a slow one.",
    do="Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one that leads to the other nodes.",
)
def several(facts: Facts) -> Result:
    variables = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    free = [name for name in variables if not facts.environment.get(name)]
    if not facts.several_nodes or not free or len(facts.usable) < 2:
        return None
    found = ", ".join(
        f"{i.name} ({i.addresses[0]}{f', {i.speed} Mb/s' if i.speed else ''})" for i in facts.usable
    )
    return f"{found}; and {' and '.join(free)} not set"


@check(
    "hostname-unresolved",
    AREA,
    Severity.error,
    why="gloo asks for the address of this machine's name; without one it listens on the loopback, which no "
    "other node reaches.",
    do="Add the name to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME.",
)
def unresolved(facts: Facts) -> Result:
    if not facts.host_error or not facts.several_nodes or _named_for_gloo(facts):
        return None
    text = f"{facts.place.host} does not resolve: {facts.host_error}"
    return Seen(text, _example(facts, "GLOO_SOCKET_IFNAME"))


@check(
    "hostname-is-loopback",
    AREA,
    Severity.error,
    why="gloo tells the other nodes this address, where they find themselves. Debian writes such a line.",
    do="Give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME.",
)
def loopback_name(facts: Facts) -> Result:
    if not facts.several_nodes or _named_for_gloo(facts) or not facts.host_addresses:
        return None
    if not _is_loopback(facts.host_addresses[0]):
        return None
    text = f"{facts.place.host} resolves to {facts.host_addresses[0]}"
    return Seen(text, _example(facts, "GLOO_SOCKET_IFNAME"))


@check(
    "master-unresolved",
    AREA,
    Severity.error,
    why="This node finds no way to the store where all ranks meet.",
    do="Use a name that all nodes resolve (getent hosts NAME), or the address.",
)
def master_unresolved(facts: Facts) -> Result:
    if not facts.master_error:
        return None
    return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')}: {facts.master_error}"


@check(
    "master-is-loopback",
    AREA,
    Severity.error,
    why="Each node looks for the store on itself: they never meet.",
    do="Set MASTER_ADDR (torchrun: --rdzv-endpoint or --master-addr) to the first node's name or address.",
)
def master_loopback(facts: Facts) -> Result:
    found = facts.master_addresses
    if facts.several_nodes and found and _is_loopback(found[0]):
        return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')} resolves to {found[0]}"
    return None


@check(
    "store-unreachable",
    AREA,
    Severity.error,
    why="Ranks wait there for each other for minutes, and fail.",
    do="Does rank 0 run, is its port free, and open in the firewall? nc -vz $MASTER_ADDR $MASTER_PORT",
)
def store_unreachable(facts: Facts) -> Result:
    return facts.store_error or None


@check(
    "infiniband-down",
    AREA,
    Severity.warning,
    why="NCCL leaves the port out: this node has less bandwidth than the others, and all wait for it.",
    do="ibstat; look at cable, switch port and subnet manager",
)
def infiniband_down(facts: Facts) -> Result:
    down = [f"{port} is {state}" for port, state in facts.infiniband.items() if state != "ACTIVE"]
    return ", ".join(down) if down and facts.devices else None
