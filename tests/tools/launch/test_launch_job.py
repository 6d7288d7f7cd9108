"""What LaunchJob refuses, and what it says would do."""

import subprocess
import sys
from typing import Any

import pytest

from parallel3d import MeshLayout, Parallel3dError
from parallel3d.tools.launch import LaunchError, LaunchJob, launch_file
from parallel3d.tools.launch.targets import missing

SCRIPT = ("train.py",)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": ()}, "such as train.py"),
        ({"command": "train.py --x"}, "sequence of words"),
        ({"command": ("python3", "-u", "x.py")}, "begin with x.py"),
        ({"command": ("/usr/bin/torchrun", "x.py")}, "begin with x.py"),
        ({"command": ("--lr", "1")}, "begin with the script"),
        ({"command": ("-m", "not a module")}, "module's name"),
        ({"command": ("-m",)}, "module's name"),
        ({"command": ("train.py", "a\0b")}, "NUL"),
        ({"command": ("train.py", "\udc80")}, "must be text"),
        ({"command": ("train.py", 3)}, "must be text"),
        ({"command": ("train.py", "--tp", "x")}, "must be a number"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": True}, "nodes is True"),
        ({"gpus_per_node": "8"}, "gpus_per_node is '8'"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"grace": -1}, "grace is -1"),
        ({"device": "gpu"}, "'cuda' or 'cpu'"),
        ({"name": "My_Job"}, "for example 'my-job'"),
        ({"name": "8b"}, "for example 'train-8b'"),
        ({"name": "a\n#SBATCH --nodes=9"}, "for example 'a-sbatch-nodes-9'"),
        ({"name": "x" * 45}, f"for example {'x' * 44!r}"),
        ({"name": ""}, "for example 'train'"),
        ({"partition": "a b"}, "partition is 'a b'"),
        ({"account": "x\n"}, "account is"),
        ({"image": "x y"}, "image is 'x y'"),
        ({"image": "-x"}, "image is '-x'"),
        ({"gpu": "H100\n"}, "gpu is"),
        ({"time": "1h"}, "such as 90, 12:00:00"),
        ({"time": "0"}, "such as 90, 12:00:00"),
        ({"env": {"a-b": "1"}}, "for example 'a_b'"),
        ({"env": {"1a": "1"}}, "for example '_1a'"),
        ({"env": {"A": 1}}, "must be text"),
        ({"env": {"A": "\0"}}, "without NUL"),
        ({"env": {"RANK": "0"}}, "the launcher sets"),
        ({"env": {"PET_NNODES": "1"}}, "the launcher sets"),
        ({"env": {"ROLE_RANK": "1"}}, "the launcher sets"),
        ({"env": {"UID": "5"}}, "UID, which bash does not let"),
        ({"domain": 0}, "domain is 0"),
        ({"env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, "leave it out or give 16 or more"),
        (
            {"layout": MeshLayout(tp=16), "nodes": 2},
            "is more than the 8 GPUs.*nearest that fits is tp 8",
        ),
        (
            {"layout": MeshLayout(shard=-1, tp=3), "nodes": 3},
            "doesn't divide the 8.*that fits is tp 2",
        ),
        ({"layout": MeshLayout(tp=4), "gpus_per_node": 6, "nodes": 2}, "Nearest that fit"),
        ({"layout": MeshLayout(shard=3)}, "Nearest that fit: replicate 1 x shard 8 x tp 1"),
        (
            {"command": ("train.py", "--tp", "16", "--shard=2"), "nodes": 4},
            "nearest that fits is tp 8",
        ),
        (
            {"command": ("train.py", "--tp", "2"), "layout": MeshLayout(shard=8)},
            "the mesh is replicate 1",
        ),
    ],
)
def test_refuses(more: dict[str, Any], says: str) -> None:
    with pytest.raises(Parallel3dError, match=says) as raised:
        LaunchJob(**{"command": SCRIPT, **more})
    assert type(raised.value) is not Parallel3dError or "must be an integer" in str(raised.value)


def test_a_wider_domain_lets_tp_cross_nodes() -> None:
    job = LaunchJob(
        command=SCRIPT, nodes=18, gpus_per_node=4, layout=MeshLayout(shard=-1, tp=8), domain=72
    )
    assert job.layout == MeshLayout(shard=9, tp=8)


def test_the_mesh_is_in_the_command_once() -> None:
    job = LaunchJob(command=("t.py", "--tp=4", "--x"), nodes=2, layout=MeshLayout(2, -1, 4))
    assert job.command == ("t.py", "--tp=4", "--x", "--replicate", "2", "--shard", "2")
    own = LaunchJob(command=("t.py", "--tp", "2", "--tp", "4"), nodes=2)
    assert own.layout == MeshLayout(1, 4, 4) and own.command == ("t.py", "--tp", "2", "--tp", "4")
    assert LaunchJob(command=("t.py", "--shard", "-1", "--tp", "2")).layout == MeshLayout(1, 4, 2)
    assert LaunchJob(command=SCRIPT).layout is None


def test_cp_is_in_the_command_if_it_is_an_axis() -> None:
    job = LaunchJob(command=("t.py", "--tp=4"), nodes=2, layout=MeshLayout(1, -1, 4, cp=2))
    assert job.layout == MeshLayout(1, 2, 4, cp=2)
    assert job.command == ("t.py", "--tp=4", "--replicate", "1", "--shard", "2", "--cp", "2")
    assert LaunchJob(command=("t.py", "--cp", "4")).layout == MeshLayout(shard=2, cp=4)
    own = LaunchJob(command=("t.py", "--cp", "folder", "--tp=2"))  # a script's own option
    assert own.layout == MeshLayout(shard=4, tp=2)
    with pytest.raises(LaunchError, match=r"the command has --tp 'folder'; it must be a number"):
        LaunchJob(command=("t.py", "--tp", "folder"))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("12:00:00", 43200),
        ("2-0", 172800),
        ("1-02:03", 93780),
        ("1-0:0:1", 86401),
    ],
)
def test_time(time: str, seconds: int) -> None:
    assert LaunchJob(command=SCRIPT, time=time).seconds == seconds


@pytest.mark.parametrize(
    ("name", "near"),
    [("slrum", "slurm"), ("kubernets", "kubernetes"), ("torchrum", "torchrun"), ("rai", "ray")],
)
def test_unknown_target(name: str, near: str) -> None:
    with pytest.raises(LaunchError, match=f"did you mean {near}"):
        launch_file(name, LaunchJob(command=SCRIPT))


@pytest.mark.parametrize(
    ("name", "target"),
    [("kubernetes", "jobset"), ("k8s", "jobset"), ("Kubernetes", "jobset"), ("sbatch", "slurm")],
)
def test_synonyms(name: str, target: str) -> None:
    image = "registry/train" if target == "jobset" else None
    job = LaunchJob(command=SCRIPT, grace=120, image=image)
    assert launch_file(name, job) == launch_file(target, job)
    assert missing(name, job) == missing(target, job)


@pytest.mark.parametrize(
    ("target", "more", "says"),
    [
        ("torchrun", {"partition": "a"}, "torchrun has no place; leave it out .slurm take it"),
        ("ray", {"image": "x"}, "kubeflow, jobset, skypilot take it"),
        ("slurm", {"image": "x"}, "slurm has no place"),
        ("skypilot", {"time": "90", "gpu": "H100"}, "skypilot has no place"),
        ("skypilot", {}, "needs --gpu"),
        ("jobset", {}, "needs --image"),
    ],
)
def test_what_a_target_lacks_or_has_no_place_for(
    target: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(LaunchError, match=says):
        launch_file(target, LaunchJob(command=SCRIPT, **more))


def test_imports_no_torch() -> None:
    """In a fresh process: a launch file is also written where torch isn't installed."""
    code = (
        "import sys; from parallel3d.launch import *; j = LaunchJob(command=('t.py',), image='x', nodes=2);"
        "[launch_file(t, j) for t in ('kubeflow', 'jobset')];"
        "print(sorted(m for m in ('torch', 'yaml', 'numpy') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
