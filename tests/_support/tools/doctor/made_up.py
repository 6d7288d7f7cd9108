"""Made-up facts: of a node that is well, and for each check of one that is not, and one that just is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.tools.doctor.facts import GIB, Device, Disk, Facts, Interface, Limits, RankPlace

LO = Interface("lo", True, ("127.0.0.1", "::1"))
ETH = Interface("eth0", True, ("10.0.0.1",), 100_000)
DOCKER = Interface("docker0", True, ("172.17.0.1",))
IB = Interface("ib0", True, ("10.1.0.1",), 400_000)
ENVIRONMENT = {
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "8",
}


def gpu(index: int, **changes: Any) -> Device:
    return replace(Device("NVIDIA H100 80GB HBM3", f"GPU-{index}"), **changes)


GOOD = Facts(
    place=RankPlace(0, 16, 0, 8, 0, "node-0"),
    environment=ENVIRONMENT,
    versions={
        "python": "3.12",
        "torch": "2.13.0",
        "cuda": "13.0",
        "nccl": "2.29.2",
        "driver": "580.1",
    },
    interfaces=(LO, ETH, DOCKER),
    host_addresses=("10.0.0.1",),
    master_addresses=("10.0.0.1",),
    infiniband={"mlx5_0/1": "ACTIVE"},
    devices=tuple(gpu(i) for i in range(8)),
    on_machine=8,
    disk=Disk("/shared", 10_000 * GIB, 20_000 * GIB, kind="lustre", shared=True),
    clock=0.0,
)
ONE_NODE = replace(GOOD, place=RankPlace(0, 8, 0, 8, 0, "node-0"))


@dataclass(frozen=True)
class Case:
    """A check's name, facts on which it fires, what it then says, and facts on which it is silent."""

    name: str
    fires: Facts
    says: str
    silent: Facts = GOOD


def env(**variables: str) -> Facts:
    return replace(GOOD, environment=ENVIRONMENT | variables)


def limits(**changes: Any) -> Facts:
    return replace(GOOD, limits=replace(Limits(), **changes))


def disk(**changes: Any) -> Facts:
    assert GOOD.disk is not None
    return replace(GOOD, disk=replace(GOOD.disk, **changes))


def device_0(**changes: Any) -> Facts:
    return replace(GOOD, devices=(gpu(0, **changes), *GOOD.devices[1:]))


NO_IB = replace(GOOD, infiniband={})
NO_GPU = replace(GOOD, devices=(), infiniband={})

OF_VARIABLES = """
renamed-variable | NCCL_ASYNC_ERROR_HANDLING=1 | is now TORCH_NCCL_ASYNC_ERROR_HANDLING |
misspelt-variable | NCCL_SOCKET_IFNAMES=eth0 | no variable of NCCL, NCCL_SOCKET_IFNAME is | NCCL_OF_A_PLUGIN=1
nccl-p2p-disabled | NCCL_P2P_DISABLE=1 | =1 | NCCL_P2P_DISABLE=0
nccl-shm-disabled | NCCL_SHM_DISABLE=1 | =1 | NCCL_SHM_DISABLE=0
nccl-tuned-by-hand | NCCL_ALGO=Ring NCCL_PROTO=LL | NCCL_ALGO=Ring, NCCL_PROTO=LL |
nccl-debug | NCCL_DEBUG=info | NCCL_DEBUG=INFO | NCCL_DEBUG=WARN
torch-distributed-debug | TORCH_DISTRIBUTED_DEBUG=DETAIL | DETAIL | TORCH_DISTRIBUTED_DEBUG=OFF
cuda-launch-blocking | CUDA_LAUNCH_BLOCKING=1 | =1 | CUDA_LAUNCH_BLOCKING=0
nccl-blocking-wait | TORCH_NCCL_BLOCKING_WAIT=1 | =1 |
errors-not-handled | TORCH_NCCL_ASYNC_ERROR_HANDLING=0 | =0 | TORCH_NCCL_ASYNC_ERROR_HANDLING=3
one-connection | CUDA_DEVICE_MAX_CONNECTIONS=1 | =1 | CUDA_DEVICE_MAX_CONNECTIONS=32
allocator-set-twice | PYTORCH_CUDA_ALLOC_CONF=a | _CONF=a | PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
gloo-interface-missing | GLOO_SOCKET_IFNAME=ens5 | ens5 is not up, or not there; here are eth0 (10.0.0.1) |
gloo-interface-missing | GLOO_SOCKET_IFNAME=ens5 | ens5 is not up | GLOO_SOCKET_IFNAME=eth0
nccl-interface-missing | NCCL_SOCKET_IFNAME==eth | =eth matches no interface | NCCL_SOCKET_IFNAME=eth
interface-of-this-machine | NCCL_SOCKET_IFNAME=docker | a loopback or container bridge; here are eth0 |
interface-of-this-machine | NCCL_SOCKET_IFNAME=docker | docker is a loopback | NCCL_SOCKET_IFNAME=^lo,docker
one-thread | OMP_NUM_THREADS=1 | with 8 CPUs for each rank | OMP_NUM_THREADS=2
"""
"""Check | variables with which it fires | what it then says | variables with which it is silent."""
OF_LIMITS = """
few-open-files | nofile=1024 nofile_hard=4096 | 1024 files may be open | nofile=8192
small-shared-memory | shm=67108864 shm_free=67108864 | 64 MiB free of 64 | shm_free=2147483648
no-shared-memory | shm=-1 shm_free=-1 | no /dev/shm |
few-processors | quota=4 | 8 ranks share 4 CPUs (64 visible, of the container's 4) | quota=64
little-memory | memory_limit=8589934592 | 8 GiB for 8 ranks | memory_limit=68719476736
"""
"""The same of limits."""


def of_table(text: str, facts: Callable[..., Facts], kind: type) -> list[Case]:
    """The cases of ``OF_VARIABLES``, whose values are of type ``kind`` for ``facts``."""
    found = []
    for line in text.strip().splitlines():
        name, fires, says, silent = (part.strip() for part in line.split("|"))
        made = [[word.split("=", 1) for word in words.split()] for words in (fires, silent)]
        first, second = (facts(**{key: kind(value) for key, value in each}) for each in made)
        found.append(Case(name, first, says, second))
    return found


CASES = [
    *of_table(OF_VARIABLES, env, str),
    *of_table(OF_LIMITS, limits, int),
    Case(
        "no-flight-record",
        env(TORCH_NCCL_ASYNC_ERROR_HANDLING="1", TORCH_NCCL_DUMP_ON_TIMEOUT="1"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT set",
        env(TORCH_NCCL_ASYNC_ERROR_HANDLING="1"),
    ),
    Case(
        "nccl-ib-disabled",
        env(NCCL_IB_DISABLE="1"),
        "mlx5_0/1",
        replace(NO_IB, environment=ENVIRONMENT | {"NCCL_IB_DISABLE": "1"}),
    ),
    Case(
        "allocator-not-expandable",
        env(PYTORCH_ALLOC_CONF="max_split_size_mb:64"),
        "max_split_size_mb:64",
        replace(NO_GPU, environment={}),
    ),
    Case(
        "restart-hangs",
        env(TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="True"),
        "--max-restarts 3 on 2 nodes",
        env(TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="False"),
    ),
    Case(
        "no-interface",
        replace(GOOD, interfaces=(LO, replace(ETH, up=False), DOCKER)),
        "lo up, eth0 down, docker0 up",
        replace(ONE_NODE, interfaces=(LO,)),
    ),
    Case(
        "several-interfaces",
        replace(GOOD, interfaces=(LO, ETH, IB)),
        "ib0 (10.1.0.1, 400000 Mb/s); and NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME not set",
        replace(env(NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="ib0"), interfaces=(LO, ETH, IB)),
    ),
    Case(
        "hostname-unresolved",
        replace(GOOD, host_addresses=(), host_error="Name or service not known"),
        "node-0 does not resolve",
        replace(env(GLOO_SOCKET_IFNAME="eth0"), host_addresses=(), host_error="not known"),
    ),
    Case(
        "hostname-is-loopback",
        replace(GOOD, host_addresses=("127.0.1.1",)),
        "node-0 resolves to 127.0.1.1",
        replace(ONE_NODE, host_addresses=("127.0.1.1",)),
    ),
    Case(
        "master-unresolved",
        replace(GOOD, master_error="not known"),
        "MASTER_ADDR=node-0: not known",
    ),
    Case(
        "master-is-loopback",
        replace(env(MASTER_ADDR="localhost"), master_addresses=("127.0.0.1",)),
        "MASTER_ADDR=localhost resolves to 127.0.0.1",
        replace(ONE_NODE, master_addresses=("127.0.0.1",)),
    ),
    Case("store-unreachable", replace(GOOD, store_error="node-0:29500: refused"), "refused"),
    Case(
        "infiniband-down",
        replace(GOOD, infiniband={"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}),
        "mlx5_1/1 is DOWN",
    ),
    Case(
        "locked-memory",
        limits(memlock=65536),
        "0.0625 MiB",
        replace(limits(memlock=65536), infiniband={}),
    ),
    Case(
        "too-many-threads",
        env(OMP_NUM_THREADS="16"),
        "8 ranks x 16 threads on 64 CPUs",
        replace(
            GOOD,
            place=RankPlace(0, 1, 0, 1),
            environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        ),
    ),
    Case("checkpoint-not-writable", disk(error="/shared: Read-only file system"), "Read-only"),
    Case("checkpoint-disk-full", disk(free=3 * GIB), "3 GiB free of", disk(free=500 * GIB)),
    Case(
        "checkpoint-on-one-node",
        disk(shared=False, kind="ext4"),
        "what rank 0 writes is not seen here (file system ext4)",
        disk(shared=True, kind="ext4"),
    ),
    Case(
        "no-device",
        replace(GOOD, devices=(), device_error="torch 2.13.0+cpu is built without CUDA"),
        "8 on this machine, none that torch can use: torch 2.13.0+cpu",
        NO_GPU,
    ),
    Case(
        "devices-hidden", replace(env(CUDA_VISIBLE_DEVICES=""), devices=()), "hides all 8", NO_GPU
    ),
    Case(
        "fewer-devices-than-ranks",
        replace(env(CUDA_VISIBLE_DEVICES="0,1,2,3"), devices=GOOD.devices[:4]),
        "4 devices for 8 ranks of this node (CUDA_VISIBLE_DEVICES=0,1,2,3)",
        replace(GOOD, devices=GOOD.devices[:1]),  # each rank is shown its own
    ),
    Case(
        "devices-unused",
        replace(GOOD, place=RankPlace(0, 8, 0, 4, 0, "node-0")),
        "4 ranks on 8 devices",
        replace(GOOD, place=RankPlace(0, 1, 0, 1)),
    ),
    Case(
        "mig",
        device_0(mig=True, name="H100 MIG 1g.10gb"),
        "1 of 8 are MIG instances: H100 MIG 1g.10gb",
    ),
    Case("no-persistence", device_0(persistence=False), "off on 1 of 8"),
    Case(
        "device-busy",
        device_0(free=70 * GIB),
        "device 0 has 10.0 GiB in use",
        device_0(free=79 * GIB),
    ),
    Case("device-faulty", device_0(errors=2), "device 0 had 2"),
    Case("device-slowed", device_0(slowed="hardware thermal"), "device 0: hardware thermal"),
]


def nodes(**changes: Any) -> dict[int, Facts]:
    """Two nodes of eight ranks; ``changes`` are of the second's."""
    made = {}
    for rank in range(16):
        node = rank // 8
        place = RankPlace(rank, 16, rank % 8, 8, node, f"node-{node}")
        other = changes if node else {}
        devices = tuple(gpu(i + 8 * node) for i in range(8))
        made[rank] = replace(GOOD, **({"place": place, "devices": devices} | other))
    return made


def on_node_1(**variables: str) -> dict[int, Facts]:
    return nodes(environment=ENVIRONMENT | variables)


def one_device_for_two() -> dict[int, Facts]:
    found = nodes()
    first = found[0].devices[:1]
    return found | {rank: replace(found[rank], devices=first) for rank in (0, 1)}


def of_unequal_sizes() -> dict[int, Facts]:
    found = nodes()
    return {
        rank: replace(own, place=replace(own.place, local_world_size=8 - own.place.node))
        for rank, own in found.items()
    }


def of_one_name() -> dict[int, Facts]:
    return {
        rank: replace(own, place=replace(own.place, host="localhost"))
        for rank, own in nodes().items()
    }


BETWEEN = [
    (
        "versions-differ",
        nodes(versions=GOOD.versions | {"nccl": "2.27.5"}),
        "nccl: 2.29.2 on node-0 (ranks 0-7); 2.27.5 on node-1 (ranks 8-15)",
    ),
    ("drivers-differ", nodes(versions=GOOD.versions | {"driver": "570.1"}), "570.1 on node-1"),
    (
        "settings-differ",
        on_node_1(NCCL_ALGO="Ring"),
        "NCCL_ALGO: not set on node-0 (ranks 0-7); Ring on node-1",
    ),
    (
        "interfaces-differ",
        on_node_1(NCCL_SOCKET_IFNAME="eth0"),
        "NCCL_SOCKET_IFNAME: not set on node-0",
    ),
    (
        "devices-differ",
        nodes(devices=GOOD.devices[:7]),
        "7 x NVIDIA H100 80GB HBM3, 80 GiB on node-1",
    ),
    ("device-shared", one_device_for_two(), "one device for ranks 0-1 on node-0"),
    (
        "nodes-differ-in-ranks",
        of_unequal_sizes(),
        "ranks of the node: 8 on node-0 (ranks 0-7); 7 on node-1",
    ),
    ("same-hostname", of_one_name(), "2 nodes are called localhost"),
    ("clocks-apart", nodes(clock=3.0), "node-1 is 3 s ahead of rank 0's node"),
    ("clocks-too-far-apart", nodes(clock=-30.0), "node-1 is 30 s behind rank 0's node"),
]
