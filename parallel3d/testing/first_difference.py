"""verify: is the parallel model the plain one, and if not, which module is the first to differ?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._util.trees import tensors_in
from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.parallelize import parallelize
from parallel3d.testing.differences.dropout import DropoutMode
from parallel3d.testing.differences.forward import Difference, owner_of
from parallel3d.testing.differences.pair import Pair, SeedOf
from parallel3d.testing.parity import (
    Case,
    LossFn,
    Parity,
    Run,
    assert_parity,
    inside,
    outside,
    runs_of,
    world_of,
)


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        layout: the mesh.
        difference: the first one; None: the parallel model computes what the plain one does.
        parity: the largest differences that ``assert_parity`` saw; empty where it did not pass.
        dropouts: how many calls of dropout were looked at.
        without_gradient: trained parameters that the loss doesn't reach: of their gradients, and of outputs
            that the loss doesn't read, nothing can be said.
    """

    layout: MeshLayout
    difference: Difference | None = None
    parity: Parity = field(default_factory=Parity)
    dropouts: int = 0
    without_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """What to verify."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    layout: MeshLayout
    loss: LossFn
    parallel: Callable[[nn.Module, DeviceMesh], nn.Module]
    steps: int
    micro_batches: int
    defer: str
    seed: int
    seed_of: SeedOf | None


def first_difference(
    build: Callable[[], nn.Module], batch: Callable[[int], Any], layout: MeshLayout, **options: Any
) -> Difference | None:
    """The first place where the parallel model departs from the plain one; None if it doesn't.

    The arguments are those of ``verify``.
    """
    return verify(build, batch, layout, **options).difference


def verify(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    layout: MeshLayout,
    *,
    loss: LossFn | None = None,
    apply: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    steps: int = 2,
    micro_batches: int = 1,
    tolerance: float = 1e-9,
    fp32: bool = False,
    seed: int = 0,
    seed_of: SeedOf | None = None,
    **options: Any,
) -> Verification:
    """Trains the plain and the parallel model side by side, by ``assert_parity``; names what differs first.

    ``assert_parity`` decides whether losses, gradients and weights are equal. If they aren't, both models
    run again with every module's inputs, outputs and gradients recorded, and the first that does not fit
    is named: in the order of the forward, then of the backward, then weights after a step. Beyond that:
    parameters that are tied, frozen or of another dtype in one model only, buffers, and dropout, which is
    left out of the comparison and checked by its masks. Other random numbers in a forward would be a
    difference; so are the running statistics of a batch norm, which data ranks don't share.

    Without a process group the ranks are simulated in this process; within one every rank calls this.

    Args:
        build: makes the plain model; called after ``torch.manual_seed(seed)``.
        batch: inputs of sample ``i``: a tensor, a tuple or list of tensors, or a dict of keyword arguments.
        layout: the mesh; a size of -1 can't be.
        loss: ``loss(model, *inputs)`` (of a dict: ``loss(model, **inputs)``) -> scalar. By default the
            output's ``loss`` (an attribute, or in a dict), the output itself if it is a scalar, or the mean
            square of its first floating-point tensor.
        apply: makes the model parallel; by default ``parallelize(model, mesh, **options)``.
        steps, micro_batches, fp32, tolerance: as of ``assert_parity``.
        seed_of: ``seed_of(layout, rank, step)``, what your training seeds a rank's generators with; by
            default what ``seed_step`` does. It decides what dropout draws.
        options: for ``parallelize``, such as ``tp_plan``.

    Raises:
        Parallel3dError: sizes that can't be, a plan that doesn't fit, a loss that is no finite scalar.
    """
    layout = layout.resolve(layout.world_size)
    for name, value in (("steps", steps), ("micro_batches", micro_batches)):
        if not isinstance(value, int) or value < 1:
            raise Parallel3dError(f"{name}={value!r}: at least 1 is needed")
    if not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise Parallel3dError(f"tolerance={tolerance!r}: a number between 0 and 1, such as 1e-9")
    names: list[str] = []
    job = _Job(
        build,
        _tuples(batch, names),
        layout,
        _loss_of(loss or default_loss, names),
        _applied(apply or (lambda model, mesh: parallelize(model, mesh, **options))),
        steps,
        micro_batches,
        "all_reduce" if apply is None else "nothing",
        seed,
        seed_of,
    )
    runs = runs_of(tolerance, fp32)
    _check_plain(job, runs[0])
    try:
        with DropoutMode():
            parity = _assert(job, tolerance, fp32)
    except Exception as error:  # the model's too: the search says where
        return _located(job, runs, error)
    # What assert_parity doesn't look at, of models that it has found equal.
    search = _search(job, runs[0], 1)
    return Verification(layout, search.found, parity, search.dropouts, search.without_gradient)


def _assert(job: _Job, tolerance: float, fp32: bool) -> Parity:
    return assert_parity(
        job.build,
        job.batch,
        job.layout,
        loss=job.loss,
        apply=job.parallel,
        steps=job.steps,
        micro_batches=job.micro_batches,
        defer=job.defer,
        fp32=fp32,
        tolerance=tolerance,
        seed=job.seed,
    )


def _located(job: _Job, runs: tuple[Run, ...], error: Exception) -> Verification:
    """Which module it is that ``assert_parity`` has complained of."""
    largest = Parity()
    for run in runs:
        search = _search(job, run, job.steps)
        rest = largest, search.dropouts, search.without_gradient
        if search.found is not None:
            return Verification(job.layout, search.found, *rest)
        if not search.local:
            break
    else:
        # assert_parity wants parameters of the plain shapes; these were compared part by part.
        return Verification(job.layout, None, *rest)
    text = str(error)
    named = next((w for w in text.split() if "." in w and w.strip(".,:").isidentifier()), "")
    return Verification(
        job.layout,
        Difference(owner_of(named)[0], "error", f"{type(error).__name__}: {text}", module_type=""),
    )


@dataclass(frozen=True)
class _Search:
    """The first difference, how many dropouts there are, and whether parameters are held as plain parts."""

    found: Difference | None
    dropouts: int
    local: bool
    without_gradient: tuple[str, ...]


def _search(job: _Job, run: Run, steps: int) -> _Search:
    """Trains both models recorded, until the first difference."""
    torch.manual_seed(job.seed)
    plain = job.build().to(run.dtype)
    parallel = copy.deepcopy(plain)
    types = {name: type(module).__name__ for name, module in plain.named_modules()}
    with world_of(job.layout) as world, outside(world):
        case = Case(run, world, job.layout, job.batch, job.loss, job.micro_batches, job.defer)
        with inside(world):
            mesh = build_mesh(job.layout, device_type="cpu")
            parallel = job.parallel(parallel, mesh)
        pair = Pair(case, plain, parallel, job.seed_of)
        dropouts = 0
        found = pair.first(steps)
        if found is None:
            found, dropouts = pair.dropout()
        local = any(fit.index for fit in pair.state.forms.values())
    if found is not None:
        kind = types.get(found.module, "")
        found = Difference(**{**found.__dict__, "module_type": kind})
    return _Search(found, dropouts, local, pair.without_gradient)


def _applied(apply: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Callable[..., nn.Module]:
    """``apply``, after which each simulated rank has its own of every parameter."""
    guarded = _guarded(apply, "making the model parallel")

    def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = guarded(model, mesh)
        if not isinstance(made, nn.Module):
            raise Parallel3dError(
                f"the function that makes the model parallel returned {type(made).__name__}, no nn.Module"
            )
        if ranks_are_simulated():
            _give_to_each(made)
        return made

    return parallel


def _give_to_each(model: nn.Module) -> None:
    """One tensor for all simulated ranks would be changed by each of them in a step. Ties stay."""
    own: dict[int, nn.Parameter] = {}
    own_buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            # What is no plain tensor is each rank's own; one with hooks can't be replaced.
            if type(param) is not nn.Parameter or param._backward_hooks:
                continue
            if param._post_accumulate_grad_hooks:
                continue
            if id(param) not in own:
                copied = torch.empty(param.shape, dtype=param.dtype).copy_(param.detach())
                own[id(param)] = nn.Parameter(copied, requires_grad=param.requires_grad)
            module._parameters[name] = own[id(param)]
        for name, buffer in module._buffers.items():
            if type(buffer) is torch.Tensor:
                if id(buffer) not in own_buffers:
                    copied = torch.empty(buffer.shape, dtype=buffer.dtype).copy_(buffer)
                    own_buffers[id(buffer)] = copied
                module._buffers[name] = own_buffers[id(buffer)]


# ---- inputs and losses ----


def _guarded(fn: Callable[..., Any], what: str) -> Callable[..., Any]:
    """``fn``, whose errors are the user's to mend: they say in what they were raised."""

    def guarded(*args: Any) -> Any:
        try:
            return fn(*args)
        except Parallel3dError:
            raise
        except Exception as error:
            raise Parallel3dError(f"{what} raised {type(error).__name__}: {error}") from error

    return guarded


_INPUTS = "a tensor, a tuple of tensors or a dict of tensors is needed"


def _tuples(batch: Callable[[int], Any], names: list[str]) -> Callable[[int], Any]:
    """Inputs as a tuple; ``names`` are those of keyword arguments."""

    def inputs(index: int) -> tuple[torch.Tensor, ...]:
        value = batch(index)
        if isinstance(value, torch.Tensor):
            return (value,)
        if not isinstance(value, Mapping | tuple | list) or not value:
            empty = "an empty " if isinstance(value, Mapping | tuple | list) else ""
            raise Parallel3dError(
                f"the inputs of sample {index} are {empty}{type(value).__name__}: {_INPUTS}"
            )
        parts = value if isinstance(value, Mapping) else dict(enumerate(value))
        for name, part in parts.items():
            if not isinstance(part, torch.Tensor):
                number = "" if isinstance(value, Mapping) else "number "
                raise Parallel3dError(
                    f"of the inputs of sample {index}, {number}{name} is {type(part).__name__}: {_INPUTS}"
                )
        if isinstance(value, Mapping):
            names[:] = list(value)
        return tuple(parts.values())

    return inputs


def _loss_of(loss: LossFn, names: list[str]) -> LossFn:
    def of(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        if names:
            return loss(model, **dict(zip(names, inputs, strict=True)))
        return loss(model, *inputs)

    return of


def default_loss(model: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """The model's own loss, or the mean square of what it puts out."""
    output = model(*args, **kwargs)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    floats = [t for t in tensors_in(output) if t.is_floating_point()]
    if not floats:
        raise Parallel3dError(
            f"{type(model).__name__} puts out {type(output).__name__} without a floating-point tensor: "
            "give a loss function"
        )
    return floats[0] if floats[0].dim() == 0 else floats[0].square().mean()


def _check_plain(job: _Job, run: Run) -> None:
    """Refuses what can't be compared with."""
    torch.manual_seed(job.seed)
    model = _guarded(job.build, "building the model")()
    if not isinstance(model, nn.Module):
        raise Parallel3dError(f"the model that was built is a {type(model).__name__}, no nn.Module")
    model = model.to(run.dtype)
    inputs = _guarded(job.batch, "making the inputs of sample 0")(0)
    cast = (t.to(run.dtype) if t.is_floating_point() else t for t in inputs)
    with DropoutMode():
        loss = _guarded(job.loss, "the plain model's loss")(model, *cast)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise Parallel3dError(f"the loss is {shape}: a scalar tensor with a gradient is needed")
    if not math.isfinite(value := float(loss.detach())):
        raise Parallel3dError(f"the plain model's loss is {value}: there is nothing to compare")
