"""Checks of network interfaces and host names, and of differences between ranks or nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.facts import GIB, Facts, Interface, is_loopback
from parallel3d.tools.doctor.finding import (
    ACROSS,
    CHECKS,
    Area,
    Result,
    Seen,
    name_hosts,
    ranks_by_value,
)

NETWORK = Area("network", CHECKS)
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def matches(interfaces: Iterable[Interface], value: str) -> list[Interface]:
    """Returns the interfaces that ``value`` of NCCL_SOCKET_IFNAME selects.

    It lists prefixes; after ``=`` whole names; after ``^`` the interfaces to exclude.
    """
    value = value.strip()
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = _names_in(value)

    def matched(name: str) -> bool:
        return any(name == n.partition(":")[0] if exact else name.startswith(n) for n in names)

    return [interface for interface in interfaces if matched(interface.name) != exclude]


def _names_in(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _gloo_names(facts: Facts) -> list[str]:
    return _names_in(facts.environment.get(_GLOO, ""))


def _ready(facts: Facts) -> list[Interface]:
    return [interface for interface in facts.interfaces if interface.up and interface.addresses]


def _instead(facts: Facts, variable: str, text: str) -> Seen:
    """``text`` with the interfaces that ``variable`` could name instead."""
    usable = facts.usable
    here = ", ".join(f"{interface.name} ({interface.addresses[0]})" for interface in usable)
    text += f"; here are {here}" if here else "; no other interface has an address"
    return Seen(text, _export(facts, variable))


def _export(facts: Facts, variable: str = _GLOO) -> str:
    return f"export {variable}={facts.usable[0].name if facts.usable else 'eth0'}"


@NETWORK.error("Name one that is up on this node; nodes may need different values.")
def gloo_interface_missing(facts: Facts) -> Result:
    """gloo can't make a process group: the rank fails at once, and the others wait for it."""
    ready = {interface.name for interface in _ready(facts)}
    wrong = [name for name in _gloo_names(facts) if name not in ready]
    if not wrong:
        return None
    return _instead(facts, _GLOO, f"{_GLOO}={','.join(wrong)} is not up, or not there")


@NETWORK.error("Name one that is up on this node (a prefix is enough; ^lo,docker excludes).")
def nccl_interface_missing(facts: Facts) -> Result:
    """NCCL finds no interface for its bootstrap and fails, or hangs on nodes where others don't."""
    value = facts.environment.get(_NCCL, "")
    if not value or matches(_ready(facts), value):
        return None
    return _instead(facts, _NCCL, f"{_NCCL}={value} matches no interface that is up")


@NETWORK.error("Name the interface that leads to the other nodes.")
def interface_of_this_machine(facts: Facts) -> Result:
    """Each node has its own interface with this address: nodes can't reach each other through it."""
    if not facts.several_nodes:
        return None
    nccl = facts.environment.get(_NCCL, "")
    by_name = {interface.name: interface for interface in facts.interfaces}
    named = {
        _GLOO: [by_name[name] for name in _gloo_names(facts) if name in by_name],
        _NCCL: matches(facts.interfaces, nccl) if nccl else [],
    }
    for variable, found in named.items():
        if found and all(each.is_loopback or each.is_of_containers for each in found):
            text = f"{variable}={facts.environment[variable]} is a loopback or container bridge"
            return _instead(facts, variable, text)
    return None


@NETWORK.error(
    "ip -br address; then set up the interface, or start the container in the host's network"
)
def no_interface(facts: Facts) -> Result:
    """Other nodes can't be reached without one."""
    if facts.several_nodes and facts.interfaces and not facts.usable:
        names = ", ".join(f"{i.name} {'up' if i.up else 'down'}" for i in facts.interfaces)
        return f"no interface but loopback and container bridges is up with an address ({names})"
    return None


@NETWORK.note(
    "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one that leads to the other nodes."
)
def several_interfaces(facts: Facts) -> Result:
    """gloo uses the one this node's name resolves to, NCCL the first: they may differ or be slow."""
    unset = [name for name in (_NCCL, _GLOO) if not facts.environment.get(name)]
    if not facts.several_nodes or not unset or len(facts.usable) < 2:
        return None
    found = ", ".join(
        f"{i.name} ({i.addresses[0]}{f', {i.speed} Mb/s' if i.speed else ''})" for i in facts.usable
    )
    return f"{found}; and {' and '.join(unset)} not set"


@NETWORK.error("Add the name to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME.")
def hostname_unresolved(facts: Facts) -> Result:
    """gloo looks up the address of this machine's name; without one it listens on the loopback, which no
    other node reaches.
    """
    if not facts.host_error or not facts.several_nodes or _gloo_names(facts):
        return None
    return Seen(f"{facts.place.host} does not resolve: {facts.host_error}", _export(facts))


@NETWORK.error("Give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME.")
def hostname_is_loopback(facts: Facts) -> Result:
    """gloo gives the other nodes this address, which there means the node itself. Debian's installer writes
    such a line to /etc/hosts.
    """
    here = facts.host_addresses  # the first is the one that gloo uses
    if not facts.several_nodes or _gloo_names(facts) or not (here and is_loopback(here[0])):
        return None
    return Seen(f"{facts.place.host} resolves to {here[0]}", _export(facts))


@NETWORK.error("Use a name that all nodes resolve (getent hosts NAME), or the address.")
def master_unresolved(facts: Facts) -> Result:
    """This node can't find the store that all ranks connect to."""
    if not facts.master_error:
        return None
    return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')}: {facts.master_error}"


@NETWORK.error(
    "Set MASTER_ADDR (torchrun: --rdzv-endpoint or --master-addr) to the first node's name or address."
)
def master_is_loopback(facts: Facts) -> Result:
    """Each node looks for the store on itself, so they never connect."""
    addresses = facts.master_addresses
    if facts.several_nodes and addresses and is_loopback(addresses[0]):
        return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')} resolves to {addresses[0]}"
    return None


@NETWORK.error(
    "Does rank 0 run, is its port free, and open in the firewall? nc -vz $MASTER_ADDR $MASTER_PORT"
)
def store_unreachable(facts: Facts) -> Result:
    """Ranks wait there for each other for minutes, and fail."""
    return facts.store_error


@NETWORK.warning("ibstat; check cable, switch port and subnet manager")
def infiniband_down(facts: Facts) -> Result:
    """NCCL does not use the port: this node has less bandwidth than the others, and all wait for it."""
    if not facts.devices:
        return None
    ports = facts.infiniband.items()
    return ", ".join(f"{port} is {state}" for port, state in ports if state != "ACTIVE")


# Differences between ranks or nodes, and how ranks are distributed over nodes.

BETWEEN_NODES = Area("between nodes", ACROSS)
_FOUND_ELSEWHERE = Area("between nodes", CHECKS)  # by doctor itself: the check never fires
# A job hangs or computes other numbers where these differ; the driver may differ.
_VERSIONS = ("python", "torch", "cuda", "nccl", "parallel3d")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE")
_COMPARED = ("NCCL_", "TORCH_", "GLOO_", "PYTORCH_", "CUDA_DEVICE_", "CUDA_LAUNCH_", "OMP_")
_NOT_COMPARED = {
    *_INTERFACES,
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS_OUT", "TORCH_TRACE", "NCCL_HOSTID"),
}
_APART, _TOO_FAR = 1.0, 10.0  # seconds
_versions, _variables = attrgetter("versions"), attrgetter("environment")


def differences(
    facts: Mapping[int, Facts],
    names: Iterable[str],
    values: Callable[[Facts], Mapping[str, str]],
    missing: str = "none",
) -> Seen | None:
    """Returns the ``names`` whose value differs between ranks, with the ranks that have each value.

    All ranks but those with the commonest value are the ones concerned.
    """
    lines, odd = [], []
    for name in names:
        of_rank = {rank: values(own).get(name, missing) for rank, own in facts.items()}
        by_value = ranks_by_value(of_rank)
        if len(by_value) < 2:
            continue
        ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
        odd += [rank for _, ranks in ordered[1:] for rank in ranks]
        shown = (f"{text} on {_places(facts, ranks)}" for text, ranks in ordered)
        lines.append(f"{name}: {'; '.join(shown)}")
    return Seen("\n".join(lines), ranks=tuple(odd)) if lines else None


def _places(facts: Mapping[int, Facts], ranks: list[int]) -> str:
    """``node-1 (ranks 4-7)`` for all ranks of whole nodes, otherwise only the ranks."""
    by_host = ranks_by_value({rank: own.place.host for rank, own in facts.items()})
    hosts = [host for host, own_ranks in by_host.items() if set(own_ranks) <= set(ranks)]
    if {rank for host in hosts for rank in by_host[host]} != set(ranks) or len(by_host) == 1:
        return name_ranks(ranks)
    return name_hosts(hosts, ranks)


@_FOUND_ELSEWHERE.error(
    "Look at these ranks' output: did they start, and reach MASTER_ADDR? Are all nodes up?"
)
def ranks_missing(facts: Facts) -> Result:
    """A job would wait for these ranks until its timeouts expire."""
    return None


@_FOUND_ELSEWHERE.error("Choose sizes whose product is the number of ranks; one may be -1.")
def mesh_does_not_fit(facts: Facts) -> Result:
    """build_mesh would raise an error."""
    return None


@BETWEEN_NODES.error("Use one image or environment on all nodes.")
def versions_differ(facts: Mapping[int, Facts]) -> Result:
    """Ranks would use different protocols: a hang in NCCL's first collective, or other numbers."""
    return differences(facts, _VERSIONS, _versions)


@BETWEEN_NODES.warning("Update the nodes with the older driver.")
def drivers_differ(facts: Mapping[int, Facts]) -> Result:
    """NCCL may choose other transports on some nodes; performance differs."""
    return differences(facts, ["driver"], _versions)


@BETWEEN_NODES.error(
    "Set the variable for the whole job: in the launch file, not in one node's profile."
)
def settings_differ(facts: Mapping[int, Facts]) -> Result:
    """Ranks that communicate with different settings may hang or be slow."""
    names = sorted({name for own in facts.values() for name in own.environment} - _NOT_COMPARED)
    compared = (name for name in names if name.startswith(_COMPARED))
    return differences(facts, compared, _variables, "not set")


@BETWEEN_NODES.warning("Use a prefix that fits all nodes, or one value for all.")
def interfaces_differ(facts: Mapping[int, Facts]) -> Result:
    """Correct only if the nodes' interfaces have different names; otherwise one uses another network."""
    return differences(facts, _INTERFACES, _variables, "not set")


@BETWEEN_NODES.warning("Use equal nodes, or leave the odd one out.")
def devices_differ(facts: Mapping[int, Facts]) -> Result:
    """All wait for the slowest device, and the smallest memory limits the batch size."""

    def kinds(own: Facts) -> dict[str, str]:
        counted = Counter(f"{d.name}, {d.total / GIB:.0f} GiB" for d in own.devices)
        found = " and ".join(f"{count} x {kind}" for kind, count in counted.items())
        return {"devices": found or "none"}

    return differences(facts, ["devices"], kinds)


@BETWEEN_NODES.error(
    "torch.cuda.set_device(LOCAL_RANK), and CUDA_VISIBLE_DEVICES unset or one device for each rank"
)
def device_shared(facts: Mapping[int, Facts]) -> Result:
    """NCCL refuses two ranks on one device (Duplicate GPU detected)."""
    used: dict[int, tuple[str, str]] = {}
    for rank, own in facts.items():
        index = 0 if len(own.devices) == 1 else own.place.local_rank
        if index < len(own.devices) and own.devices[index].uuid:
            used[rank] = own.place.host, own.devices[index].uuid
    shared = {key: ranks for key, ranks in ranks_by_value(used).items() if len(ranks) > 1}
    text = "; ".join(f"{name_ranks(ranks)} on {host}" for (host, _), ranks in shared.items())
    return Seen(f"one device for {text}", ranks=(*chain(*shared.values()),)) if shared else None


@BETWEEN_NODES.warning("Start the same number of ranks on every node.")
def nodes_differ_in_ranks(facts: Mapping[int, Facts]) -> Result:
    """tp groups then lie across nodes, which is slow, and fewer meshes are possible."""
    name = "ranks of the node"
    return differences(facts, [name], lambda own: {name: str(own.place.local_world_size)})


@BETWEEN_NODES.warning("Give each node a name of its own with hostnamectl set-hostname.")
def same_hostname(facts: Mapping[int, Facts]) -> Result:
    """torchrun and gloo identify machines by name: nodes with the same name are taken for one."""
    nodes = {(own.place.host, own.place.node) for own in facts.values() if own.place.node >= 0}
    counts = Counter(host for host, _ in sorted(nodes))
    return "; ".join(f"{n} nodes are called {host}" for host, n in counts.items() if n > 1)


def _clocks(facts: Mapping[int, Facts], least: float, most: float) -> Result:
    """The ranks whose clocks are at least ``least`` and less than ``most`` seconds off rank 0's."""
    off = {
        rank: own.clock
        for rank, own in sorted(facts.items())
        if own.clock is not None and least <= abs(own.clock) - own.clock_error < most
    }
    text = "; ".join(
        f"{facts[r].place.host} is {abs(s):.3g} s {'ahead of' if s > 0 else 'behind'} rank 0's node"
        for r, s in off.items()
    )
    return Seen(text, ranks=tuple(off)) if off else None


@BETWEEN_NODES.warning("chronyc tracking (or timedatectl): let all nodes follow one time server")
def clocks_apart(facts: Mapping[int, Facts]) -> Result:
    """Times in the nodes' logs and traces don't agree; tokens and certificates may be refused."""
    return _clocks(facts, _APART, _TOO_FAR)


@BETWEEN_NODES.error(
    "chronyc makestep (or timedatectl set-ntp true), then let all nodes follow one time server"
)
def clocks_too_far_apart(facts: Mapping[int, Facts]) -> Result:
    """torchrun's c10d rendezvous compares clocks: it takes a node 15 s behind for a dead one."""
    return _clocks(facts, _TOO_FAR, float("inf"))
