"""The plain and the parallel model, trained side by side and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel3d._torch.simulated import for_each_rank
from parallel3d.mesh import MeshLayout
from parallel3d.mesh.seeding import StepSeed, number_at
from parallel3d.optim import accumulate
from parallel3d.testing.differences.dropout import DropoutMode, first_in_dropout
from parallel3d.testing.differences.fit import Fit, Group, fit_value
from parallel3d.testing.differences.forward import (
    Difference,
    Forward,
    compare_forward,
    first_in_backward,
    first_in_forward,
    output_of,
    owner_of,
)
from parallel3d.testing.differences.record import Recorder, Trace, Values, merged, own_ranks
from parallel3d.testing.differences.state import State, gathered
from parallel3d.testing.parity import Case, inside

SeedOf = Callable[[MeshLayout, int, int], int]


def step_seed(layout: MeshLayout, rank: int, step: int) -> int:
    """The seed that ``seed_step(mesh, seed=0, step=step)`` makes on ``rank``."""
    return number_at(StepSeed(0, step, 0), layout.data_rank(rank))


class Pair:
    """Both models; outside the simulation, entering it for what the parallel one does.

    Args:
        case: what to run.
        plain, parallel: with the same values.
        seed_of: the seed of a rank's generators in a step.

    Attributes:
        without_gradient: the plain model's parameters that the loss of the first step does not reach.
    """

    def __init__(
        self, case: Case, plain: nn.Module, parallel: nn.Module, seed_of: SeedOf | None
    ) -> None:
        layout = case.layout
        self.case, self.plain, self.parallel = case, plain, parallel
        self.seed_of = seed_of or step_seed
        own = own_ranks(None if case.world is None else case.world.size)
        self.groups = [
            Group(d, tuple(r for r in range(layout.world_size) if layout.data_rank(r) == d))
            for d in range(layout.data_size)
        ]
        self.recorders = Recorder(plain, (0,)), Recorder(parallel, own)
        self.state = State(plain, parallel, self.groups, own)
        self.bound = case.run.grads
        self.own = own
        self.forward = Forward()
        self.traces = Trace(), Trace()
        self.without_gradient: tuple[str, ...] = ()

    # ---- the search ----

    def first(self, steps: int) -> Difference | None:
        """The first difference of ``steps`` steps."""
        found = self.state.structure() or self.state.weights_at_start(self.bound)
        if found is not None:
            return found
        optimizers = [self.case.run.optimizer(m.parameters()) for m in (self.plain, self.parallel)]
        for step in range(steps):
            found = self.step(step, optimizers)
            if found is not None:
                return found
        return None

    def step(self, step: int, optimizers: list[torch.optim.Optimizer]) -> Difference | None:
        """The first difference of one step; both models have made it then."""
        before = self.state.keep_buffers()
        plain_losses = self.run_plain(step)
        losses, error = self.run_parallel(step)
        found = self.in_forward(step, plain_losses, losses, error)
        if found is None:
            gaps = self.state.gaps("gradient", self.bound)
            found = first_in_backward(
                *self.traces,
                self.forward,
                self.groups,
                gaps,
                data_size=self.case.layout.data_size,
                step=step,
                bound=self.bound,
            )
            # What comes after may undo a wrong output, as a norm does with a factor, but not its gradient.
            if found is not None:
                first = first_in_forward(self.traces[0], self.forward, step, self.bound)
                found = first or output_of(self.forward, found) or found
        if step == 0:
            self.without_gradient = self.state.without_gradient()
        if found is not None:
            # The mode explains what is computed, but nothing that is raised.
            return found if found.kind == "error" else self.state.modes() or found
        optimizers[0].step()
        optimizers[0].zero_grad()
        with inside(self.case.world):
            optimizers[1].step()
            optimizers[1].zero_grad()
        return self.after_step(step) or self.state.buffers_after(before, step, self.bound)

    def in_forward(
        self, step: int, plain: list[Values], parallel: list[Values], error: Exception | None
    ) -> Difference | None:
        """The first module whose output differs, or that raised; the loss, if only that differs."""
        self.forward = compare_forward(*self.traces, self.groups, self.bound)
        gaps = [
            fit_value(want, got, self.groups, self.bound, kinds=frozenset({"whole"}))
            for want, got in zip(plain, parallel, strict=False)
        ]
        gap = next((g for g in gaps if not isinstance(g, Fit)), None)
        if error is None and gap is None:
            return None
        found = first_in_forward(self.traces[0], self.forward, step, self.bound)
        if found is not None:
            return found
        if error is not None:
            return self.raised(error, step)
        assert gap is not None
        return Difference(
            "(loss)", "loss", "loss", step, gap.rank, gap.difference, self.bound, gap.hint
        )

    def raised(self, error: Exception, step: int) -> Difference:
        """What the parallel model raises and the plain one doesn't."""
        stack = self.recorders[1].stack
        name = stack[-1].key[0] if stack else "(loss)"
        text = " ".join(str(error).split())
        return Difference(name, "error", f"{type(error).__name__}: {text[:500]}", step)

    def after_step(self, step: int) -> Difference | None:
        """A weight that differs though its gradient did not."""
        for name, gap in self.state.gaps("weight", self.case.run.weights).items():
            module, own = owner_of(name)
            return Difference(
                module, "weight after a step", f"{own} after step {step}, though its gradient is right",
                step, gap.rank, gap.difference, self.case.run.weights, gap.hint,
            )  # fmt: skip
        return None

    def dropout(self) -> tuple[Difference | None, int]:
        """The first dropout that draws what it must not, in a step that was compared; how many there are."""
        masks = Trace()
        recorder = self.recorders[1]
        with inside(self.case.world), DropoutMode(recorder, masks=True):
            self.seed(0)
            inputs = self.case.parallel_inputs(0, 0)
            with recorder.recording(masks):
                self.case.loss(self.parallel, *inputs)
        masks = merged(gathered(masks))
        return first_in_dropout(*self.traces, masks, self.forward, self.groups)

    # ---- running ----

    def run_plain(self, step: int) -> list[Values]:
        """Losses by micro-batch and data rank; leaves the gradients of their mean."""
        case, recorder, traces = self.case, self.recorders[0], []
        losses: list[Values] = [{} for _ in range(case.micro_batches)]
        count = case.layout.data_size * case.micro_batches
        for group in self.groups:
            traces.append(Trace())
            recorder.own = (group.data_rank,)
            for micro in range(case.micro_batches):
                torch.default_generator.manual_seed(self.seed_of(case.layout, group.ranks[0], step))
                with DropoutMode(recorder):
                    inputs = case.inputs(step, micro, group.data_rank)
                    with recorder.recording(traces[-1]):
                        loss = case.loss(self.plain, *inputs)
                    (loss / count).backward()
                losses[micro][group.data_rank] = loss.detach()
        self.traces = merged(traces), self.traces[1]
        return losses

    def run_parallel(self, step: int) -> tuple[list[Values], Exception | None]:
        """Losses by micro-batch and rank, as far as it came, and what it raised."""
        trace, losses, error = Trace(), [], None
        recorder = self.recorders[1]
        try:
            with inside(self.case.world), DropoutMode(recorder):
                for micro in self.micro_batches():
                    self.seed(step)
                    inputs = self.case.parallel_inputs(step, micro)
                    with recorder.recording(trace):
                        loss = self.case.loss(self.parallel, *inputs)
                    losses.append(recorder.values(loss))
                    (loss / self.case.micro_batches).backward()
        except Exception as caught:
            error = caught
        self.traces = self.traces[0], merged(gathered(trace))
        return [_joined(gathered(each)) for each in losses], error

    def micro_batches(self) -> Iterator[int]:
        """Their numbers; what is ours puts the all-reduce off until the last."""
        numbers = range(self.case.micro_batches)
        ours = self.case.defer == "all_reduce"
        ours = ours and any(isinstance(m, FSDPModule) for m in self.parallel.modules())
        yield from accumulate(self.parallel, numbers) if ours else numbers

    def seed(self, step: int) -> None:
        """Each rank's generator."""
        layout = self.case.layout

        def one(rank: int) -> None:
            torch.default_generator.manual_seed(self.seed_of(layout, rank, step))

        if self.case.world is None:
            one(self.own[0])
        else:
            for_each_rank(one)


def _joined(values: list[Values]) -> Values:
    found: Values = {}
    for each in values:
        found |= each
    return found
