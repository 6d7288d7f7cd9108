"""verify: compares a parallel model with the plain one, and names the first module that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d._torch.simulated import for_each_rank, ranks_are_simulated
from parallel3d._util.trees import cast_floats
from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout
from parallel3d.mesh.seeding import StepSeed, number_at
from parallel3d.parallelize import parallelize
from parallel3d.testing.differences.dropout import DropoutMode, first_in_dropout
from parallel3d.testing.differences.fit import WHOLE, Comparison, FitGap, FitGroup
from parallel3d.testing.differences.forward import Backward, Difference, Forward, owner_of
from parallel3d.testing.differences.record import ForwardRecorder, ForwardTrace, Values, merged
from parallel3d.testing.differences.state import State, gathered, joined
from parallel3d.testing.parity import (
    Case,
    Parity,
    ParityRun,
    Setup,
    ShardBatch,
    compare,
    default_shard_batch,
    inside,
    runs_of,
)
from parallel3d.testing.samples import LossFn, Samples, built, cast_model, errors_named

SeedOf = Callable[[MeshLayout, int, int], int]


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``.

    Attributes:
        layout: the mesh.
        difference: the first one; None if the parallel model computes what the plain one does.
        parity: the largest differences that ``assert_parity`` saw; empty if it did not pass.
        dropouts: number of calls of dropout that were checked.
        without_gradient: trained parameters that the loss does not reach. Their gradients, and outputs that
            the loss does not read, were not compared.
        made: which inputs were made, if none were given.
    """

    layout: MeshLayout
    difference: Difference | None = None
    parity: Parity = field(default_factory=Parity)
    dropouts: int = 0
    without_gradient: tuple[str, ...] = ()
    made: str = ""


def first_difference(
    build: Callable[[], nn.Module], batch: Any, layout: MeshLayout, **options: Any
) -> Difference | None:
    """Returns the first place where the parallel model differs from the plain one, or None.

    The arguments are those of ``verify``: ``build``, ``batch``, ``layout`` and its ``options``.
    """
    return verify(build, batch, layout, **options).difference


def verify(
    build: Callable[[], nn.Module],
    batch: Any,
    layout: MeshLayout,
    *,
    loss: LossFn | None = None,
    apply: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    shard_batch: ShardBatch | None = None,
    steps: int = 2,
    micro_batches: int = 1,
    tolerance: float = 1e-9,
    fp32: bool = False,
    seed: int = 0,
    seed_of: SeedOf | None = None,
    **options: Any,
) -> Verification:
    """Trains the plain and the parallel model side by side and names what differs first.

    ``assert_parity`` decides whether losses, gradients and weights are equal. If they are not, both models
    run again with every module's inputs, outputs and gradients recorded, and the first that does not fit is
    named: in the order of the forward, then of the backward, then weights after a step. It also compares
    buffers, and which parameters are tied, frozen or of another dtype. Dropout is switched off for this and
    checked by its masks. Other random numbers in a forward are a difference; so are the running statistics of
    a batch norm, which data ranks don't share. On a mesh with cp it compares what ``assert_parity`` does, no
    more.

    Without a process group the ranks are simulated in this process; within one every rank calls this.

    Args:
        build: makes the plain model; called after ``torch.manual_seed(seed)``.
        batch: as in ``assert_parity``.
        layout: the mesh; no size may be -1.
        loss: ``loss(model, *inputs)`` (for a dict: ``loss(model, **inputs)``) -> scalar. By default the
            output's ``loss`` (an attribute or dict entry), the output itself if it is a scalar, or the mean
            square of its first floating-point tensor.
        apply: makes the model parallel; by default ``parallelize(model, mesh, **options)``.
        shard_batch, steps, micro_batches, fp32, tolerance: as in ``assert_parity``.
        seed_of: ``seed_of(layout, rank, step)`` returns the seed your training gives a rank's generators,
            which decides what dropout draws; by default the seed of ``seed_step``.
        seed: seed of the initial weights.
        options: for ``parallelize``, such as ``tp_plan``.

    Raises:
        Parallel3dError: an argument is out of range, a plan does not fit, or the loss is not a finite scalar.
    """
    layout = layout.resolve(layout.world_size)
    for name, value in (("steps", steps), ("micro_batches", micro_batches)):
        if not isinstance(value, int) or value < 1:
            raise Parallel3dError(f"{name}={value!r}: at least 1 is needed")
    if not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise Parallel3dError(f"tolerance={tolerance!r}: a number between 0 and 1, such as 1e-9")
    with errors_named("making the inputs"):
        samples = Samples(batch, partial(built, build, seed), layout.data_size * micro_batches)
    setup = Setup(
        build,
        samples,
        layout,
        samples.loss_of(loss),
        _applied(apply or (lambda model, mesh: parallelize(model, mesh, **options))),
        micro_batches,
        "all_reduce" if apply is None else "nothing",
        seed,
        shard_batch or default_shard_batch(layout, apply),
    )
    runs = runs_of(tolerance, fp32)
    _check_plain(setup, runs[0])
    try:
        with DropoutMode():
            parity = compare(setup, runs, steps)
    except Exception as error:  # an assertion, or the model's: the search finds the module
        if layout.cp > 1:  # the search doesn't know which part of a sequence a rank has
            return Verification(layout, _unlocated(error))
        for run in runs:
            result, sharded = _search(setup, run, steps, seed_of)
            if result.difference is not None:
                return result
            if not sharded:
                return Verification(layout, _unlocated(error))
        # assert_parity requires parameters of the plain shapes; the search compared plain tensors by parts.
        return result
    if layout.cp > 1:
        return Verification(layout, None, parity, made=samples.made)
    # assert_parity compares neither structure nor buffers nor dropout.
    result, _ = _search(setup, runs[0], 1, seed_of)
    return replace(result, parity=parity, made=samples.made)


def _unlocated(error: Exception) -> Difference:
    """Returns a Difference for an error that the search could not reproduce; its text names the module."""
    words = str(error).split()
    named = next((w for w in words if "." in w and w.strip(".,:").isidentifier()), "")
    return Difference(owner_of(named)[0], "error", f"{type(error).__name__}: {error}")


def _search(
    setup: Setup, run: ParityRun, steps: int, seed_of: SeedOf | None
) -> tuple[Verification, bool]:
    """Returns the result up to the first difference, and whether ranks hold shards as plain tensors."""
    dropouts = 0
    with setup.case(run) as case:
        types = {name: type(module).__name__ for name, module in case.plain.named_modules()}
        pair = Pair(case, seed_of)
        difference = pair.first(steps)
        if difference is None:
            difference, dropouts = pair.dropout()
        sharded = any(fit.index for fit in pair.state.forms.values())
    if difference is not None:
        difference = replace(difference, module_type=types.get(difference.module, ""))
    result = Verification(setup.layout, difference, Parity(), dropouts, pair.without_gradient)
    return result, sharded


def _applied(apply: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Callable[..., nn.Module]:
    """Returns a function that calls ``apply`` and then gives each simulated rank its own parameters."""

    def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        with errors_named("making the model parallel", model):
            made = apply(model, mesh)
        if not isinstance(made, nn.Module):
            raise Parallel3dError(
                f"the function that makes the model parallel returned {type(made).__name__}, no nn.Module"
            )
        if ranks_are_simulated():
            _copy_for_ranks(made)
        return made

    return parallel


def _copy_for_ranks(model: nn.Module) -> None:
    """Replaces plain parameters and buffers, which every simulated rank would update, by tensors that have a
    copy for each rank. Tied ones stay tied. A tensor with hooks is not replaced."""
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        own: Any
        for own, kind in ((module._parameters, nn.Parameter), (module._buffers, torch.Tensor)):
            for name, tensor in own.items():
                if type(tensor) is not kind:
                    continue
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                    continue
                if id(tensor) not in copies:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
                    if kind is nn.Parameter:
                        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    copies[id(tensor)] = copy
                own[name] = copies[id(tensor)]


# ---- the search ----


def step_seed(layout: MeshLayout, rank: int, step: int) -> int:
    """Returns the seed that ``seed_step(mesh, seed=0, step=step)`` sets on ``rank``."""
    return number_at(StepSeed(0, step, 0), layout.data_rank(rank))


class Pair:
    """Both models of a Case, recorded and compared. Its methods are called while the simulation is suspended.

    ``without_gradient`` are the plain model's parameters that the loss of the first step does not reach.
    """

    def __init__(self, case: Case, seed_of: SeedOf | None) -> None:
        layout = case.setup.layout
        self.case, self.plain, self.parallel = case, case.plain, case.parallel
        self.seed_of = seed_of or step_seed
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.own = (rank,) if case.world is None else tuple(range(case.world.size))
        self.groups = [
            FitGroup(d, tuple(r for r in range(layout.world_size) if layout.data_rank(r) == d))
            for d in range(layout.data_size)
        ]
        self.recorders = ForwardRecorder(self.plain, (0,)), ForwardRecorder(self.parallel, self.own)
        self.state = State(self.plain, self.parallel, self.groups, self.own)
        self.bound = case.run.grads
        self.traces = ForwardTrace(), ForwardTrace()
        self.forward = Forward(*self.traces, self.groups, self.bound)  # of the last step
        self.without_gradient: tuple[str, ...] = ()

    def first(self, steps: int) -> Difference | None:
        """Trains both models for ``steps`` steps, or until something differs, and returns that."""
        difference = self.state.structure() or self.state.weights_at_start(self.bound)
        if difference is not None:
            return difference
        optimizers = self.case.optimizers()
        for step in range(steps):
            difference = self._step(step, optimizers)
            if difference is not None:
                return difference
        return None

    def _step(self, step: int, optimizers: list[torch.optim.Optimizer]) -> Difference | None:
        before = self.state.keep_buffers()
        plain_losses = self._run_plain(step)
        losses, error = self._run_parallel(step)
        difference = self._in_forward(step, plain_losses, losses, error)
        if difference is None:
            gaps = self.state.gaps("gradient", self.bound)
            difference = Backward(self.forward, self.case.setup.layout.data_size).first(gaps, step)
            # A later module may undo a wrong output, as a norm does with a factor, but not its gradient.
            if difference is not None:
                difference = (
                    self.forward.first(step) or self.forward.output_of(difference) or difference
                )
        if step == 0:
            self.without_gradient = self.state.without_gradient()
        if difference is not None:
            # A difference in training mode explains what is computed, but not an error.
            return difference if difference.kind == "error" else self.state.modes() or difference
        self.case.update(optimizers)
        bound = self.case.run.weights
        for name, gap in self.state.gaps("weight", bound).items():
            module, own = owner_of(name)
            what = f"{own} after step {step}, though its gradient is right"
            return Difference.of_gap(module, "weight after a step", what, step, gap, bound)
        return self.state.buffers_after(before, step, self.bound)

    def _in_forward(
        self, step: int, plain: list[Values], parallel: list[Values], error: Exception | None
    ) -> Difference | None:
        """Returns the first module whose output differs or that raised ``error``; or the loss, if only it
        differs. ``plain``, ``parallel``: the losses."""
        self.forward = Forward(*self.traces, self.groups, self.bound)
        fits = (
            Comparison(want, got, self.groups, self.bound).fit(WHOLE)
            for want, got in zip(plain, parallel, strict=False)
        )
        gap = next((fit for fit in fits if isinstance(fit, FitGap)), None)
        if error is None and gap is None:
            return None
        difference = self.forward.first(step)
        if difference is not None:
            return difference
        if error is not None:
            stack = self.recorders[1].stack
            text = " ".join(str(error).split())
            what = f"{type(error).__name__}: {text[:500]}"
            return Difference(stack[-1].key[0] if stack else "(loss)", "error", what, step)
        assert gap is not None
        return Difference.of_gap("(loss)", "loss", "loss", step, gap, self.bound)

    def dropout(self) -> tuple[Difference | None, int]:
        """Runs a forward with dropout; returns the first one with a wrong mask, and how many there are."""
        masks = ForwardTrace()
        mode = DropoutMode(self.recorders[1], masks=True)
        with inside(self.case.world), mode, self._recording_parallel(masks, 0):
            self.case.setup.loss(self.parallel, *self.case.parallel_inputs(0, 0))
        return first_in_dropout(self.forward, merged(gathered(masks)))

    def _run_plain(self, step: int) -> list[Values]:
        """Runs the plain model's forward and backward; returns its losses by micro-batch and data rank."""
        recorder, traces = self.recorders[0], [ForwardTrace() for _ in self.groups]

        @contextmanager
        def recording(data_rank: int) -> Iterator[None]:
            recorder.own = (data_rank,)
            self._seed(self.groups[data_rank].ranks[0], step)
            with recorder.recording(traces[data_rank]):
                yield

        with DropoutMode(recorder):
            losses = self.case.plain_step(step, recording)
        self.traces = merged(traces), self.traces[1]
        return losses

    def _run_parallel(self, step: int) -> tuple[list[Values], Exception | None]:
        """As ``_run_plain``, for the parallel model: losses by micro-batch and rank, an error or None."""
        trace, error = ForwardTrace(), None
        losses: list[Values] = []
        recorder, recording = self.recorders[1], partial(self._recording_parallel, trace)
        try:
            with inside(self.case.world), DropoutMode(recorder):
                for loss in self.case.parallel_step(step, recording):
                    losses.append(recorder.values(loss))
        except Exception as caught:
            error = caught
        self.traces = self.traces[0], merged(gathered(trace))
        return [joined(values) for values in losses], error

    @contextmanager
    def _recording_parallel(self, trace: ForwardTrace, step: int) -> Iterator[None]:
        """Seeds the generator of each rank, and records the forward in the body in ``trace``."""
        if self.case.world is None:
            self._seed(self.own[0], step)
        else:
            for_each_rank(partial(self._seed, step=step))
        with self.recorders[1].recording(trace):
            yield

    def _seed(self, rank: int, step: int) -> None:
        torch.default_generator.manual_seed(self.seed_of(self.case.setup.layout, rank, step))


def _check_plain(setup: Setup, run: ParityRun) -> None:
    """Raises Parallel3dError if the plain model, its inputs or its loss can't be used for a comparison."""
    model = cast_model(built(setup.build, setup.seed), run.dtype)
    with errors_named("making the inputs of sample 0"):
        inputs = setup.batch(0)
    what = (
        f"the plain model's loss, of the model and {len(inputs)} input{'s' * (len(inputs) != 1)},"
    )
    with DropoutMode(), errors_named(what, model):
        loss = setup.loss(model, *cast_floats(inputs, run.dtype))
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise Parallel3dError(f"the loss is {shape}: a scalar tensor with a gradient is needed")
    if not math.isfinite(value := float(loss.detach())):
        raise Parallel3dError(f"the plain model's loss is {value}: there is nothing to compare")
