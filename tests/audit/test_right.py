"""What is right is not blamed: every way to train, on small meshes of processes. Each kind of program that
passes cp's static check and computes something else ends in an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.audit.models import PLAN, Block, Net, cut, loss_of, made
from _support.audit.silent import KINDS, example_of
from torch import nn

import parallel3d as p3d
from parallel3d import AuditError, MeshLayout, StateError
from parallel3d.testing import GlooPool
from parallel3d.tp import Colwise, Rowwise, VocabParallel

BF16 = p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


SEQUENCE = {
    "tok": VocabParallel(output="sequence"),
    "layers.*.norm": "sequence_parallel",
    "layers.*.norm2": "sequence_parallel",
    "layers.*.{q,k,v}": Colwise(input="sequence"),
    "layers.*.o": Rowwise(output="sequence"),
    "layers.*.up": Colwise(input="sequence"),
    "layers.*.down": Rowwise(output="sequence"),
    "norm": "sequence_parallel",
    "head": Colwise(input="sequence", output="replicate"),
}


def dropped() -> nn.Module:
    return Net(lambda: Block(0.5))


CASES: dict[str, tuple[MeshLayout, dict[str, Any], Callable[[], nn.Module]]] = {
    "FSDP": (MeshLayout(1, 4), {}, Net),
    "HSDP": (MeshLayout(2, 2), {}, Net),
    "replicas": (MeshLayout(4, 1), {}, Net),
    "HFSDP": (MeshLayout(2, 2), {"shard_optimizer_over_replicate": True}, Net),
    "tp": (MeshLayout(1, 2, tp=2), {"tp_plan": PLAN}, Net),
    "auto": (MeshLayout(1, 2, tp=2), {"tp_plan": "auto"}, Net),
    "sequence parallel": (MeshLayout(1, 2, tp=2), {"tp_plan": SEQUENCE}, Net),
    "loss parallel": (MeshLayout(1, 2, tp=2), {"tp_plan": "auto", "loss_parallel": True}, Net),
    "cp": (MeshLayout(1, 1, cp=4), {}, Net),
    "cp and tp": (MeshLayout(1, 1, cp=2, tp=2), {"tp_plan": PLAN}, Net),
    "shard and cp": (MeshLayout(1, 2, cp=2), {"context_parallel": "gather"}, Net),
    "ring": (MeshLayout(2, 1, cp=2), {"context_parallel": "ring"}, Net),
    "recomputed": (MeshLayout(1, 2, cp=2), {"activation_checkpointing": True}, Net),
    "selective": (MeshLayout(1, 2, cp=2), {"activation_checkpointing": "selective"}, Net),
    "offload": (MeshLayout(1, 2, cp=2), {"activation_checkpointing": "offload"}, Net),
    "compiled": (MeshLayout(1, 2, cp=2), {"compile": "aot_eager"}, Net),
    "mixed": (MeshLayout(1, 2, cp=2), {"mp_policy": BF16}, Net),
    "mixed tp": (MeshLayout(1, 2, tp=2), {"mp_policy": BF16, "tp_plan": PLAN}, Net),
    "dropout": (MeshLayout(1, 2, cp=2), {}, dropped),
    "kept gathered": (MeshLayout(1, 4), {"reshard_after_forward": False}, Net),
    "chunked loss": (MeshLayout(1, 4), {"loss_parallel": "chunked"}, Net),
}


def train(names: list[str]) -> list[str]:
    """The report of each case; what is blamed raises."""
    found = []
    for name in names:
        layout, options, build = CASES[name]
        mesh = p3d.build_mesh(layout, device_type="cpu")
        model = made(mesh, build, **options)
        rank = layout.data_rank(torch.distributed.get_rank())
        try:
            loss_of(model, cut(mesh, seed=rank)).backward()
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        report = p3d.audit.report(model)
        assert report is not None, name
        assert not report.findings and report.largest < 1, name
        assert set(report.compared) >= {"layers.0", "layers.1", "head"}, (name, report.compared)
        found.append(f"{name}: {report}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_blamed(gloo_pool: GlooPool, name: str) -> None:
    gloo_pool.run(train, [name], world_size=4)


# Programs that pass cp's static check


def run_kind(kind: str) -> list[str]:
    """The first line of each program's error; "" where there is none."""
    found = []
    mesh = p3d.build_mesh(MeshLayout(cp=2), device_type="cpu")
    for build, step in KINDS[kind]:
        torch.manual_seed(0)
        model = build()
        example = example_of(model)
        model = p3d.parallelize(model, mesh, example=example)
        try:
            step(model, cut(mesh, length=33), mesh)
        except (AuditError, StateError) as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            found.append("")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_an_error_on_every_rank(gloo_pool: GlooPool, kind: str) -> None:
    first, second = gloo_pool.run(run_kind, kind, world_size=2)
    assert all(first), first
    assert [a.partition(":")[0] for a in first] == [b.partition(":")[0] for b in second]
