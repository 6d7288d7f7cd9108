"""After ``record`` the process is as it was before, however the program ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from _support.models import lm_loss
from _support.tools.dryrun.programs import WORLD, batch, cuda_mesh, own
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import parallel3d as p3d
from parallel3d._torch import groups
from parallel3d._torch.fake import loader_iterators
from parallel3d._util.replaced_params import _check
from parallel3d.errors import DryRunError, StateError
from parallel3d.fsdp.watch import _count_step
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import real, record
from parallel3d.tools.dryrun.world import script

OBJECTS = (
    *("init_process_group", "destroy_process_group", "all_gather_object", "gather_object"),
    *("broadcast_object_list", "scatter_object_list", "barrier", "all_reduce"),
)


def state() -> dict[str, Any]:
    """What a dry run changes while it lasts."""
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "argv": list(sys.argv),
        "path": list(sys.path),
        "group": dist.is_initialized(),
        "dist": [getattr(dist, name) for name in OBJECTS],
        "mesh": DeviceMesh.__init__,
        "resize": torch.UntypedStorage.resize_,
        "loaders": [(kind.__init__, kind._next_data) for kind in loader_iterators()],
        "cuda": {name: value for name, value in vars(torch.cuda).items() if callable(value)},
        "modes": (_get_current_function_mode_stack(), _get_current_dispatch_mode_stack()),
        "module hooks": [
            dict(hooks._global_forward_hooks),
            dict(hooks._global_forward_pre_hooks),
            dict(hooks._global_forward_hooks_always_called),
        ],
        # But for those that are there from the first sharded model of the process on.
        "optimizer hooks": [
            [hook for hook in of_step.values() if hook not in (_check, _count_step)]
            for of_step in (
                optimizers._global_optimizer_pre_hooks,
                optimizers._global_optimizer_post_hooks,
            )
        ],
        "backend": groups.pretended_backend,
        "active": p3d.dryrun.active(),
        "stance": torch._dynamo.eval_frame._stance.stance,
        "defaults": (torch.get_default_device(), torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "a value": torch.ones(2).sum().item(),
    }


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """After each test all is as it was."""
    before = state()
    yield
    after = state()
    assert {what: after[what] for what in before if after[what] != before[what]} == {}


def train() -> None:
    """One step."""
    model = own(mesh=cuda_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    lm_loss(model, batch()).backward()
    optimizer.step()


def fails() -> None:
    train()
    raise ValueError("of the program itself")


def is_interrupted() -> None:
    train()
    raise KeyboardInterrupt


def fails_in_forward() -> None:
    model = own()

    def broken(*_: object) -> None:
        raise LookupError("in the middle of a forward")

    model.layers[1].register_forward_pre_hook(broken)
    model(batch())


def fails_within_real() -> None:
    with real():
        raise OSError("data")


def decides() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    assert torch.empty(2).is_meta
    if torch.randn(3, device="cpu").sum() > 0:
        pass


def ends() -> None:
    train()
    sys.exit(3)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (train, None),
        (fails, ValueError),
        (is_interrupted, KeyboardInterrupt),
        (fails_in_forward, LookupError),
        (fails_within_real, OSError),
        (decides, DryRunError),
        (ends, SystemExit),
    ],
)
def test_all_is_as_it_was(program: Callable[[], None], error: type[BaseException] | None) -> None:
    with pytest.raises(error) if error else nullcontext():
        record(program, WORLD)


def test_an_error_of_the_program_passes_through_unchanged() -> None:
    mine = ValueError("mine")

    def program() -> None:
        raise mine

    with pytest.raises(ValueError) as caught:
        record(program, WORLD)
    assert caught.value is mine and mine.__cause__ is None


def test_steps_end_the_program_from_within() -> None:
    reached = []

    def program() -> None:
        model = own()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(9):
            lm_loss(model, batch()).backward()
            optimizer.step()
            reached.append(optimizer)

    assert record(program, WORLD, steps=2).steps == 2
    assert len(reached) == 1  # the second step did not return


@pytest.mark.parametrize("after_errors", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_second_run_finds_the_same(after_errors: bool) -> None:
    first = record(train, WORLD, 3)
    for program, error in ((fails, ValueError), (fails_in_forward, LookupError)):
        with pytest.raises(error) if after_errors else nullcontext():
            record(program if after_errors else lambda: None, WORLD)
    second = record(train, WORLD, 3)
    for name in ("collectives", "operations", "memory", "parameters", "unknown"):
        assert getattr(first, name) == getattr(second, name)
    assert first.peak.by_kind == second.peak.by_kind


@pytest.mark.slow
def test_the_order_of_random_numbers_is_the_programs_own() -> None:
    torch.manual_seed(5)
    record(train, WORLD)
    first = torch.randn(4)
    torch.manual_seed(5)
    record(train, WORLD)
    assert torch.equal(torch.randn(4), first)


def test_who_has_a_group_already_is_told() -> None:
    with fake_world(1, 4):
        with pytest.raises(StateError, match="record: this process is already rank 1"):
            record(train, WORLD)
        assert dist.get_world_size() == 4
        dist.barrier()


def test_a_dry_run_within_one_is_refused() -> None:
    with pytest.raises(StateError, match="in a dry run already"):
        record(lambda: record(train, WORLD), WORLD)


def test_wrong_arguments_change_nothing() -> None:
    for options in ({"gpus_per_node": 0}, {"backend": "mpi"}):
        with pytest.raises(DryRunError, match="must be"):
            record(train, WORLD, **options)
    with pytest.raises(p3d.MeshError):
        record(train, WORLD, WORLD)


def test_a_script_leaves_argv_and_path(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    file = tmp_path / "program.py"
    file.write_text(
        "import sys\nfrom beside import VALUE\n"
        "assert VALUE == 3 and sys.argv[1:] == ['--more'], sys.argv\n"
        "sys.argv.append('x'); sys.path.append('y')\n"
        "sys.exit(sys.argv[1] == '--more' and 4)\n"
    )
    try:
        with pytest.raises(DryRunError, match="ended with 4"):
            record(script(file, ["--more"]), WORLD)
    finally:
        sys.modules.pop("beside", None)
