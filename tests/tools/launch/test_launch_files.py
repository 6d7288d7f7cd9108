"""The files themselves: shell that shellcheck passes, YAML of the right shape, each word as it was given."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from _support.tools.launch_jobs import COMMAND, ENV, job_for
from torch.distributed.run import get_args_parser

from parallel3d.mesh import MeshLayout
from parallel3d.tools.launch import TARGETS, LaunchJob, launch_file
from parallel3d.tools.launch.job import LaunchError

yaml = pytest.importorskip("yaml")

FAKE = """\
#!/usr/bin/env python3
import json, os, string, sys
words = [string.Template(word).safe_substitute(local_rank="9") for word in sys.argv[1:]]  # as torchrun does
names = [n for n in os.environ if n.startswith("ODD_")] + ["OMP_NUM_THREADS"]
print(json.dumps([words, {n: os.environ[n] for n in names}]))
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a torchrun that prints its arguments and our variables, as JSON."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "torchrun").write_text(FAKE)
    (folder / "torchrun").chmod(0o755)
    return folder


def run_bash(
    arguments: list[str], fake: Path, folder: Path, **variables: str
) -> tuple[list[str], dict]:
    """What torchrun got from ``bash *arguments``; nothing else may have been run."""
    environment = {"PATH": f"{fake}:{os.environ['PATH']}", "HOME": "/nowhere", **variables}
    done = subprocess.run(
        ["bash", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "oops").exists()
    words, env = json.loads(done.stdout)
    return words, env


def check_words(words: list[str], env: dict[str, str]) -> list[str]:
    """The options before the script; what follows, and the environment, are as given."""
    at = words.index("train.py")
    assert words[at:] == list(COMMAND)
    assert {k: v for k, v in env.items() if k.startswith("ODD_")} == ENV
    assert env["OMP_NUM_THREADS"] == "8"
    return words[:at]


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes expands command, args and env: $(NAME) if there is one, $$ is $."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("nodes", "restarts", "grace"), [(1, 0, 0), (1, 2, 120), (4, 0, 120), (4, 2, 0)]
)
def test_shellcheck(
    target: str, device: str, nodes: int, restarts: int, grace: int, tmp_path: Path
) -> None:
    job = job_for(target, device=device, nodes=nodes, max_restarts=restarts, grace=grace)
    file = tmp_path / f"file{TARGETS[target].suffix}"
    file.write_text(launch_file(target, job))
    checker = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = subprocess.run([*checker, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("nodes", [1, 4])
def test_torchrun_gets_each_word(nodes: int, fake: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(launch_file("torchrun", job_for("torchrun", nodes=nodes, max_restarts=3)))
    if nodes > 1:
        done = subprocess.run(["bash", str(file)], capture_output=True, text=True)
        assert done.returncode != 0 and "HEAD: the host name" in done.stderr
    words, env = run_bash([str(file)], fake, tmp_path, HEAD="first", RUN="a b", LOCAL="10.0.0.2")
    options = check_words(words, env)
    assert "--max-restarts=3" in options and any("SIGUSR1" in option for option in options)
    if nodes > 1:
        wanted = {"--rdzv-endpoint=first:29500", "--rdzv-id=a b", "--local-addr=10.0.0.2"}
        assert wanted <= {*options}
    else:
        assert "--standalone" in options


def test_slurm_directives_come_first_and_are_ours(tmp_path: Path) -> None:
    """sbatch reads them up to the first command; a line of an argument must not be one."""
    text = launch_file("slurm", job_for("slurm", max_restarts=2))
    directives = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    first = "--job-name=train --nodes=4 --ntasks-per-node=1 --gres=gpu:H100:8 --exclusive --mem=0"
    more = "--time=12:00:00 --partition=main --account=lab --output=%x-%j.out --open-mode=append"
    assert directives == [*first.split(), *more.split(), "--signal=B:USR1@120", "--requeue"]
    assert text.index("#SBATCH --requeue") < text.index("set -euo pipefail")
    assert "gres" not in launch_file("slurm", job_for("slurm", gpu=None, device="cpu"))
    plain = launch_file("slurm", job_for("slurm", grace=0))
    assert "USR1@" not in plain and "scontrol requeue" not in plain and "--no-requeue" in plain


@pytest.mark.parametrize("grace", [0, 120])
def test_slurm_loops_only_if_it_may_start_again(grace: int) -> None:
    once = launch_file("slurm", job_for("slurm", grace=grace))
    assert not [word for word in ("for attempt", "break", "-lt", "once more") if word in once]
    assert once.count("\nsrun --kill-on-bad-exit=1") == 1
    again = launch_file("slurm", job_for("slurm", grace=grace, max_restarts=2))
    assert "for attempt in {0..2}; do" in again and "\n    srun --kill-on-bad" in again


@pytest.mark.parametrize("target", ["torchrun", "slurm", "skypilot"])
def test_the_environment_is_entered_first(target: str) -> None:
    """Before ``set -u``, under which a venv's or module's script may fail."""
    lines = "module load cuda\nsource it\\'s/bin/activate"
    text = launch_file(target, job_for(target, setup=lines))
    margin = "  " if target == "skypilot" else ""
    assert lines.replace("\n", f"\n{margin}") in text and text.index("source it") < text.index(
        "set -eu"
    )
    with pytest.raises(LaunchError, match="jobset has no place"):
        launch_file("jobset", job_for("jobset", setup=lines))


def test_slurm_node_gets_each_word(fake: Path, tmp_path: Path) -> None:
    """The function that each node runs, alone: the node's number is that of its own environment."""
    text = launch_file("slurm", job_for("slurm"))
    file = tmp_path / "node.sh"
    functions = text[text.index("attend() {") : text.index("# The time is nearly over")]
    settings = text[text.index("set -euo") : text.index("# The first node's name")]
    file.write_text(f"{settings}\n{functions}\nbash -c run_node\n")
    slurm = {"SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "3", "SLURM_JOB_ID": "7"}
    words, env = run_bash([str(file)], fake, tmp_path, MASTER_ADDR="n1", MASTER_PORT="15", **slurm)
    options = check_words(words, env)
    assert {"--nnodes=4", "--node-rank=3", "--master-addr=n1", "--master-port=15"} <= {*options}


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] == "TrainJob":
        return document["spec"]["trainer"]
    (replicated,) = document["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("target", ["kubeflow", "jobset"])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_container_gets_each_word(
    target: str, nodes: int, restarts: int, fake: Path, tmp_path: Path
) -> None:
    """The manifest as Kubernetes would run it, with the variables of the third pod."""
    text = launch_file(target, job_for(target, nodes=nodes, max_restarts=restarts))
    container = container_of(yaml.safe_load(text))
    pet = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "h"}
    variables = {**pet, "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "2"}
    own = {each["name"]: expanded(each["value"], variables) for each in container["env"]}
    words = [expanded(w, variables | own) for w in container["command"] + container["args"]]
    assert words[0] == "bash"
    options = check_words(*run_bash(words[1:], fake, tmp_path, **variables, **own))
    if nodes == 1:
        assert "--standalone" in options
    elif target == "jobset":
        head = "--master-addr=train-node-0-0.train"
        assert {"--nnodes=4", "--node-rank=2", head, "--max-restarts=0"} <= {*options}
    elif restarts:
        assert "--rdzv-endpoint=h:29400" in options
        assert "--rdzv-conf=read_timeout=600,is_host=false" in options
    else:  # from PET_*
        assert not any(
            o.startswith(("--nnodes", "--master", "--rdzv", "--node-rank")) for o in options
        )


@pytest.mark.parametrize("nodes", [1, 4])
def test_skypilot_gets_each_word(nodes: int, fake: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(
        launch_file("skypilot", job_for("skypilot", nodes=nodes, max_restarts=2))
    )
    assert document["num_nodes"] == nodes and document["resources"]["accelerators"] == "H100:8"
    assert document["resources"]["image_id"] == "docker:registry/name:1.2"
    assert document["resources"]["job_recovery"] == {"max_restarts_on_errors": 2}
    assert document["envs"].items() >= ENV.items()
    file = tmp_path / "run.sh"
    file.write_text("#!/bin/bash\n# shellcheck disable=SC1003,SC2016\n" + document["run"])
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    sky = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "3"}
    sky["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"
    words, env = run_bash([str(file)], fake, tmp_path, **sky, **document["envs"])
    options = check_words(words, env)
    if nodes > 1:
        assert {"--nnodes=4", "--node-rank=3", "--master-addr=10.0.0.1"} <= {*options}


def test_ray_script_holds_each_word() -> None:
    """It compiles, and its literals are what was given; ray itself is not needed."""
    job = job_for("ray", max_restarts=2, layout=MeshLayout(1, 8, 4))
    tree = ast.parse(launch_file("ray", job))
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert tuple(found["COMMAND"]) == job.command and found["PROCESSES_PER_NODE"] == 8
    assert found["COMMAND"][-6:] == ["--replicate", "1", "--shard", "8", "--tp", "4"]
    assert found["ENVIRONMENT"].items() >= ENV.items()
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    options = {
        k.arg: k.value for c in calls for k in c.keywords if isinstance(k.value, ast.Constant)
    }
    assert options["num_workers"].value == 32 and options["max_failures"].value == 2
    assert options["use_gpu"].value is True


def test_our_settings_give_way_to_given_ones() -> None:
    for target in TARGETS:
        text = launch_file(
            target, job_for(target, env={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"})
        )
        assert "WARN" not in text and text.count("NCCL_DEBUG") == 1, target
        assert text.count("OMP_NUM_THREADS") == 1
        assert launch_file(target, job_for(target)) == launch_file(target, job_for(target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_torchrun_that_comes_back_is_let_in(target):
    """Where jobs restart on several nodes; see docs/guards.md."""
    more = {"image": "i:1"} if target in ("kubeflow", "jobset") else {}
    more |= {"gpu": "H100"} if target == "skypilot" else {}
    for nodes, restarts in ((2, 1), (2, 0), (1, 1)):
        job = LaunchJob(command=("train.py",), nodes=nodes, max_restarts=restarts, **more)
        wanted = nodes > 1 and restarts > 0
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in launch_file(target, job)) is wanted


@pytest.mark.parametrize("target", [each for each in TARGETS if each != "ray"])
def test_the_grace_is_an_option_where_torchrun_has_it(target: str) -> None:
    """2.11's has not, and ends with its usage."""
    known = get_args_parser()._option_string_actions
    file = launch_file(target, job_for(target, grace=77))
    assert ("--shutdown-timeout=77 " in file) == ("--shutdown-timeout" in known)


def test_slurm_refuses_a_job_that_would_be_requeued_for_ever() -> None:
    """SLURM would ask it to stop as it starts."""
    with pytest.raises(LaunchError, match="4 minutes or more, or --grace 0"):
        launch_file("slurm", LaunchJob(command=("train.py",), time="2"))
    assert "USR1@" not in launch_file("slurm", LaunchJob(command=("t.py",), time="2", grace=0))
    launch_file("slurm", LaunchJob(command=("train.py",), time="3"))
