"""A dry run's parameters, gradients and optimizer state are what the planner says, to the byte."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _support.planner.state_models import Case, Net, random_case, spec_of
from _support.tools.dryrun.dry_programs import Training, train
from llama import SIZES, Llama
from plans import LLAMA_TP_PLAN
from torch import nn

from parallel3d import MeshLayout, Sharding, build_mesh, optim, parallelize
from parallel3d.fsdp import param
from parallel3d.planner import Workload
from parallel3d.planner.from_module import spec_from_module
from parallel3d.planner.memory import state_memory
from parallel3d.tools.dryrun import DryRun, record

COUNTER = 4  # bytes of a parameter's count of steps, which the planner does not count


def state(run: DryRun, counters: int) -> tuple[int, int, int]:
    """Bytes after the last step, before the trainer lets go of its gradients."""
    end = max(reversed(run.memory), key=lambda each: each.by_kind.get("gradients", 0)).by_kind
    return end["parameters"], end["gradients"], end["optimizer state"] - COUNTER * counters


def steps_of(case: Case, memory: str = "on demand") -> None:
    model = Net(case)
    mesh = build_mesh(case.layout, device_type="cpu")
    sharding = Sharding(reshard_after_forward=case.reshard)
    parallelize(model, mesh, case.plan(), sharding, mp_policy=case.policy, memory=memory)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.local(torch.optim.AdamW, trained, foreach=True)
    tokens = torch.arange(16).view(2, 8) % case.vocab
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).float().pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)),
        *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 30)),
    ],
)
def test_random_models_and_layouts(seed, monkeypatch):
    case = random_case(seed)
    monkeypatch.setattr(param, "CPU_BYTES", case.large)
    run = record(lambda: steps_of(case), case.layout.world_size, backend="gloo")
    wanted = state_memory(
        spec_of(Net(case), case),
        case.layout,
        case.workload,
        zero_copy_bytes=case.large,
        streams=False,
    )
    assert state(run, counters=0) == (wanted.parameters, wanted.gradients, wanted.optimizer)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "seed",
    [0, 3, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, *range(4, 30)))],
)
def test_fixed_buffers(seed, backend, monkeypatch):
    """With static memory they are what is there after a step beside the state, on streams too."""
    case = random_case(seed)
    for name in ("CPU_BYTES", "ACCELERATOR_BYTES"):
        monkeypatch.setattr(param, name, case.large)
    world = case.layout.world_size
    run = record(lambda: steps_of(case, "static"), world, backend=backend)
    wanted = state_memory(
        spec_of(Net(case), case),
        case.layout,
        replace(case.workload, memory="static"),
        zero_copy_bytes=case.large,
        streams=backend == "nccl",
    )
    end = run.memory[-1].by_kind
    found = end.get("unsharded parameters", 0), end.get("communication", 0)
    assert found == wanted.played.fixed


LAYOUT = MeshLayout(16, 32, 8)
WORKLOAD = Workload(seq_len=8192, micro_batch=1, precision="bf16", param_dtype="fp32")


def planned(layers: int) -> tuple[int, int, int]:
    with torch.device("meta"):
        model: nn.Module = Llama(Training((16, 32, 8), size="70b", layers=layers).config)
    spec = spec_from_module(model, tp_plan=LLAMA_TP_PLAN, seq_len=32)
    wanted = state_memory(spec, LAYOUT, WORKLOAD, zero_copy_bytes=param.CPU_BYTES, streams=False)
    return wanted.parameters, wanted.gradients, wanted.optimizer


@pytest.mark.slow
def test_layers_of_llama_70b_on_4096_ranks():
    case = Training((16, 32, 8), size="70b", layers=8, rows=1, micro=1, steps=1)
    run = record(lambda: train(case), case.world_size)
    assert run.mesh == {"replicate": 16, "shard": 32, "tp": 8}
    assert state(run, len(run.parameters)) == planned(8)
    assert run.seconds < 60


WHOLE = """
import json, resource, sys, time
from parallel3d.tools.dryrun import record
from parallel3d.tools.dryrun.world import script
run = record(script(sys.argv[1], sys.argv[2:]), 4096)
end = max(reversed(run.memory), key=lambda each: each.by_kind.get("gradients", 0)).by_kind
counters = 4 * len(run.parameters)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([end["parameters"], end["gradients"], end["optimizer state"] - counters]))
print(json.dumps([time.process_time(), peak, run.steps, len(run.collectives)]))
"""


@pytest.mark.full
def test_train_py_with_llama_70b_on_4096_ranks():
    """The example as it is, in a process of its own: under a minute of one core, and 4 GiB."""
    example = Path(__file__).parents[3] / "examples" / "llama" / "train.py"
    options = "--size 70b --replicate 16 --shard 32 --tp 8 --batch 512 --mixed-precision --steps 1"
    command = [sys.executable, "-c", WHOLE, str(example), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    found, (seconds, memory, steps, collectives) = map(eval, done.stdout.splitlines()[-2:])
    assert tuple(found) == planned(SIZES["70b"].n_layers)
    assert steps == 1 and collectives > 600
    assert seconds < 60 and memory < 4 * 2**30
