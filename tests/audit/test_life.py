"""When a step is audited, what is left afterwards, and what else is asked of an audited model."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.audit.models import Block, Net, cut, loss_of, made
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d import AuditError, MeshLayout, StateError
from parallel3d.audit.training import audit_of
from parallel3d.testing import GlooPool, fake_world


class Wrong(Net):
    """Its plain code is right for one rank, and says so."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = super().forward(ids)
        return y * 2 if vars(self).get("is_wrong") else y


def calls_of_a_step(model: nn.Module, batch: Any) -> int:
    """Python calls into the audit's files in one step."""
    count = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "parallel3d/audit" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        loss_of(model, batch).backward()
    finally:
        sys.setprofile(None)
    return count


def life(mesh: DeviceMesh) -> None:
    model = made(mesh, Wrong)
    batch = cut(mesh, seed=torch.distributed.get_rank())
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    assert p3d.audit.report(model) is None
    assert calls_of_a_step(model, batch) > 0
    first = p3d.audit.report(model)
    assert first is not None and sum(first.compared.values()) > 20
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == (
        hooks[0] - 1,
        hooks[1] - 1,
    )
    assert calls_of_a_step(model, batch) == 0  # it costs nothing any more
    with torch.no_grad():
        model.eval()(batch[0])
    model.train()
    model.is_wrong = True
    loss_of(model, batch).backward()
    assert p3d.audit.report(model) is first
    p3d.audit.next_step(model)
    with pytest.raises(
        AuditError, match=r"the model itself: output differs.*2 times the plain one"
    ):
        loss_of(model, batch).backward()
    second = p3d.audit.report(model)
    assert second is not None and second.findings[0].unit == ""
    model.is_wrong = False
    model.zero_grad()
    loss_of(model, batch).backward()  # it goes on after the error
    copied = copy.deepcopy(model)
    loss_of(copied, batch).backward()
    with pytest.raises(StateError, match="it is a copy"):
        p3d.audit.next_step(copied)


def interrupted(mesh: DeviceMesh) -> None:
    model = made(mesh, lambda: Net(lambda: Block(0.5)))
    batch = cut(mesh)
    loss_of(model, batch)  # no backward follows
    with pytest.raises(IndexError):
        model(batch[0] + 1000)
    with torch.no_grad():
        model(batch[0])
    assert p3d.audit.report(model) is None
    loss_of(model, batch).backward()
    report = p3d.audit.report(model)
    assert report is not None and report.notes == ["the step ran without dropout"]
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.5}


def accumulated(mesh: DeviceMesh) -> None:
    model = made(mesh)
    counts = []
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, cut(mesh, seed=micro)).backward()
        report = p3d.audit.report(model)
        assert report is not None
        counts.append(report.compared["head"])
    assert counts[0] == counts[1] == counts[2] - 2  # its weight and bias, once they are reduced
    assert not audit_of(model).train_due


def several_forwards(mesh: DeviceMesh) -> None:
    """As preference training does: two forwards, one backward."""
    model = made(mesh, Wrong)
    loss_of(model, cut(mesh, seed=7))  # nobody asks for its gradient
    (loss_of(model, cut(mesh, seed=1)) - 0.5 * loss_of(model, cut(mesh, seed=2))).backward()
    report = p3d.audit.report(model)
    assert report is not None and not audit_of(model).train_due
    model.zero_grad()
    p3d.audit.next_step(model)
    first, second = loss_of(model, cut(mesh, seed=1)), loss_of(model, cut(mesh, seed=2))
    second.backward()
    first.backward()
    assert p3d.audit.report(model) is not report


class Checkpointed(Net):
    """Its blocks are recomputed by torch's reentrant checkpoint around them."""

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def reentrant(mesh: DeviceMesh) -> None:
    model = made(mesh, Checkpointed)
    loss_of(model, cut(mesh)).backward()
    report = p3d.audit.report(model)
    assert report is not None and report.compared["layers.0"] > 12


def updated_in_backward(mesh: DeviceMesh) -> None:
    model = made(mesh)
    p3d.optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
    loss_of(model, cut(mesh)).backward()
    report = p3d.audit.report(model)
    assert report is not None and "changes the weights" in str(report) and not report.compared


def frozen_later(mesh: DeviceMesh) -> None:
    """A user freezes parameters after ``parallelize``, as a training by stages does."""
    model = made(mesh)
    first = next(model.parameters())
    first.requires_grad_(False)
    loss_of(model, cut(mesh)).backward()
    report = p3d.audit.report(model)
    assert report is not None and sum(report.compared.values()) > 20
    first.requires_grad_(True)
    p3d.audit.next_step(model)
    loss_of(model, cut(mesh)).backward()
    assert p3d.audit.report(model) is not report


CASES = (
    pytest.param(life, marks=pytest.mark.smoke),
    interrupted,
    accumulated,
    several_forwards,
    reentrant,
    updated_in_backward,
    frozen_later,
)


def on_two_ranks(case: Callable[[DeviceMesh], None]) -> None:
    case(p3d.build_mesh(MeshLayout(1, 2), device_type="cpu"))


@pytest.mark.parametrize("case", CASES)
def test_of_an_audit(gloo_pool: GlooPool, case: Callable[[DeviceMesh], None]) -> None:
    gloo_pool.run(on_two_ranks, case, world_size=2)


def test_who_has_none() -> None:
    with fake_world(0, 2):
        mesh = p3d.build_mesh(MeshLayout(1, 2), device_type="cpu")
        model = p3d.parallelize(Net(), mesh)
        with pytest.raises(StateError, match="audit=True"):
            p3d.audit.next_step(model)
        simulated = p3d.parallelize(Net(), mesh, audit=True)
        with pytest.raises(StateError, match="simulated, or a dry run"):
            p3d.audit.next_step(simulated)
        loss_of(simulated, cut(mesh)).backward()
