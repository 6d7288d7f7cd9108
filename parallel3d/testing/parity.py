"""assert_parity: the one oracle. A parallel model computes what the plain one does, on any mesh."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._layout.packed import PackedDTensor, packed_boxes
from parallel3d._torch.dtensor import dtensor_shard_box, get_local_tensor, root_mesh
from parallel3d._torch.simulated import ranks_are_simulated, tensors_by_rank
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.optim import accumulate
from parallel3d.parallelize import parallelize
from parallel3d.testing.worlds import LocalWorld, local_world

LossFn = Callable[..., torch.Tensor]


@dataclass
class Parity:
    """Largest relative differences that one run of ``assert_parity`` saw.

    Attributes:
        loss, grads, weights: by dtype name, such as ``{"float64": 1e-16}``.
    """

    loss: dict[str, float] = field(default_factory=dict)
    grads: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One pass of the comparison."""

    dtype: torch.dtype
    optimizer: Callable[..., torch.optim.Optimizer]
    grads: float  # tolerance of loss and gradients
    weights: float


def adamw(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Fused where it can be: then DTensor decides once a step and not once an operation and parameter."""
    params = list(params)
    fused = _may_be_fused(params)
    groups: dict[int, list[torch.Tensor]] = {}  # no kernel takes DTensors beside others
    for param in params:
        mesh = id(param.device_mesh) if isinstance(param, DTensor) else 0
        groups.setdefault(mesh, []).append(param)
    return torch.optim.AdamW([{"params": each} for each in groups.values()], lr=1e-2, fused=fused)


def _may_be_fused(params: list[torch.Tensor]) -> bool:
    """torch's fused kernel ignores strides on CPU, and a last part of a cut row may have gaps."""
    locals_ = [get_local_tensor(p) if isinstance(p, DTensor) else p for p in params]
    fused = all(p.is_floating_point() and p.is_contiguous() for p in locals_)
    if not ranks_are_simulated() and any(isinstance(p, DTensor) for p in params):
        agreed = torch.tensor([float(fused)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed.item())
    return fused


def sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """What passes rounding on as it is."""
    return torch.optim.SGD(params, lr=1e-2)


_EXACT = 1e-8


def runs_of(tolerance: float = 1e-9, fp32: bool = True) -> tuple[Run, ...]:
    """The passes of a comparison, see ``assert_parity``."""
    # AdamW divides a gradient by its own size: where that is nothing but rounding, so is the step.
    exact = tolerance <= _EXACT
    double = Run(torch.float64, adamw if exact else sgd, tolerance, 10 * tolerance)
    single = Run(torch.float32, sgd, 1e-5, 1e-5)
    return (double, single) if fp32 else (double,)


def assert_parity(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    layout: MeshLayout,
    *,
    loss: LossFn | None = None,
    steps: int = 5,
    micro_batches: int = 1,
    defer: str = "all_reduce",
    apply: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    fp32: bool = True,
    tolerance: float = 1e-9,
    seed: int = 0,
    **options: Any,
) -> Parity:
    """Trains the plain and the parallel model side by side and compares them.

    In float64 with AdamW: loss and gradients (against the model's largest gradient) after the first
    step within 1e-9, weights after ``steps`` steps within 1e-8; in float32 with SGD all within 1e-5.
    Every rank's shard is compared with the part of the plain tensor that its placements name, so
    wrong placements show too.

    Without a process group the ranks are simulated in this process; within one (gloo processes, or
    torchrun) every rank calls this and compares its own shards.

    Args:
        build: makes the plain model; called after ``torch.manual_seed(seed)``.
        batch: inputs of sample ``i``, a tensor or a tuple of tensors; floating-point ones are cast.
            One sample goes to each data rank, micro-batch and step.
        layout: the mesh, resolved.
        loss: ``loss(model, *inputs)`` -> scalar; by default the mean square of the model's output.
        steps: optimizer steps.
        micro_batches: micro-batches a step.
        defer: what all but the last micro-batch put off: ``"all_reduce"`` (``optim.accumulate``),
            ``"sync"`` (``set_requires_gradient_sync``) or ``"nothing"``.
        apply: makes the model parallel; by default ``parallelize(model, mesh, **options)``.
        fp32: whether to make the float32 run too.
        tolerance: of loss and gradients in float64; of weights ten times that. Above 1e-8, for models that
            compute something in float32 themselves, the float64 run is with SGD too.
        options: for ``parallelize``, such as ``tp_plan``.

    Raises:
        AssertionError: naming the tensor, rank and difference that are out of tolerance.
    """
    result = Parity()
    for run in runs_of(tolerance, fp32):
        torch.manual_seed(seed)
        plain = build().to(run.dtype)
        parallel = copy.deepcopy(plain)
        with world_of(layout) as world, outside(world):
            case = Case(run, world, layout, batch, loss or mean_square, micro_batches, defer)
            with inside(world):
                mesh = build_mesh(layout, device_type="cpu")
                if apply is not None:
                    parallel = apply(parallel, mesh)
                else:
                    parallel = parallelize(parallel, mesh, **options)
            case.compare(plain, parallel, steps, result)
    return result


def mean_square(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    return model(*inputs).square().mean()


@contextmanager
def world_of(layout: MeshLayout) -> Iterator[LocalWorld | None]:
    """Simulated ranks, unless this process is a rank already."""
    if dist.is_initialized():
        yield None
        return
    with local_world(layout.world_size) as world:
        yield world


def outside(world: LocalWorld | None) -> Any:
    return nullcontext() if world is None else world.paused()


@contextmanager
def inside(world: LocalWorld | None) -> Iterator[None]:
    """Within ``paused``: the simulation on again."""
    if world is None:
        yield
        return
    with world.resumed():
        yield


class Case:
    """One comparison; its methods run outside the simulation, entering it for parallel work."""

    def __init__(
        self,
        run: Run,
        world: LocalWorld | None,
        layout: MeshLayout,
        batch: Callable[[int], Any],
        loss: LossFn,
        micro_batches: int,
        defer: str,
    ) -> None:
        self.run, self.world, self.layout = run, world, layout
        self.batch, self.loss = batch, loss
        self.micro_batches, self.defer = micro_batches, defer
        self.name = str(run.dtype).removeprefix("torch.")

    def inputs(self, step: int, micro: int, data_rank: int) -> tuple[torch.Tensor, ...]:
        """What one data rank reads."""
        size = self.layout.data_size
        value = self.batch((step * self.micro_batches + micro) * size + data_rank)
        tensors = value if isinstance(value, tuple) else (value,)
        return tuple(t.to(self.run.dtype) if t.is_floating_point() else t for t in tensors)

    def compare(self, plain: nn.Module, parallel: nn.Module, steps: int, result: Parity) -> None:
        """Trains both, comparing as ``assert_parity`` says."""
        plain_optimizer = self.run.optimizer(plain.parameters())
        parallel_optimizer = self.run.optimizer(parallel.parameters())
        objects = [id(p) for p in parallel.parameters()]
        for step in range(steps):
            plain_losses = self.plain_step(plain, step)
            with inside(self.world):
                parallel_losses = self.parallel_step(parallel, step)
            if step == 0:
                result.loss[self.name] = self.compare_losses(plain_losses, parallel_losses)
                result.grads[self.name] = self.compare_grads(plain, parallel)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            with inside(self.world):
                parallel_optimizer.step()
                parallel_optimizer.zero_grad()
        assert objects == [id(p) for p in parallel.parameters()], "parameters were replaced"
        result.weights[self.name] = self.compare_weights(plain, parallel)

    def plain_step(self, model: nn.Module, step: int) -> list[list[torch.Tensor]]:
        """Losses by micro-batch and data rank; the gradient is that of their mean."""
        data_size = self.layout.data_size
        losses: list[list[torch.Tensor]] = []
        for micro in range(self.micro_batches):
            losses.append([])
            for data_rank in range(data_size):
                loss = self.loss(model, *self.inputs(step, micro, data_rank))
                (loss / (data_size * self.micro_batches)).backward()
                losses[-1].append(loss.detach())
        return losses

    def parallel_step(self, model: nn.Module, step: int) -> list[torch.Tensor]:
        """This rank's losses (or all simulated ranks') by micro-batch."""
        losses = []
        indices = range(self.micro_batches)
        micros = accumulate(model, indices) if self.defer == "all_reduce" else indices
        for micro in micros:
            if self.defer == "sync":
                last = micro == self.micro_batches - 1
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            loss = self.loss(model, *self.parallel_inputs(step, micro))
            (loss / self.micro_batches).backward()
            losses.append(loss.detach())
        return losses

    def parallel_inputs(self, step: int, micro: int) -> tuple[torch.Tensor, ...]:
        """Real ranks: this one's inputs. Simulated: each rank's."""
        if self.world is None:
            return self.inputs(step, micro, self.layout.data_rank(dist.get_rank()))
        with self.world.paused():
            by_rank = [
                self.inputs(step, micro, self.layout.data_rank(rank))
                for rank in range(self.layout.world_size)
            ]
        by_input = list(zip(*by_rank, strict=True))
        return tuple(self.world.map(tensors.__getitem__) for tensors in by_input)

    # -- comparisons ---------------------------------------------------------------------------------

    def compare_losses(
        self, plain: list[list[torch.Tensor]], parallel: list[torch.Tensor]
    ) -> float:
        """Each rank's loss against that of the sample it read."""
        worst = 0.0
        for expected, losses in zip(plain, parallel, strict=True):
            for rank, loss in _by_rank(losses):
                want = expected[self.layout.data_rank(rank)]
                difference = float((loss - want).abs() / want.abs().clamp(min=1e-30))
                self.check("loss", "loss", rank, difference, self.run.grads)
                worst = max(worst, difference)
        return worst

    def compare_grads(self, plain: nn.Module, parallel: nn.Module) -> float:
        """Each gradient against the model's largest: a key bias has true gradient zero."""
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        scale = max(float(g.abs().max()) for g in grads if g.numel())
        pairs = self.pairs(plain, parallel)
        worst = 0.0
        for name, p, q in pairs:
            assert (p.grad is None) == (q.grad is None), f"{name}: only one side has a gradient"
            if p.grad is not None and q.grad is not None:
                worst = max(worst, self.compare_tensor("gradient", name, p.grad, q.grad, scale))
        return worst

    def compare_weights(self, plain: nn.Module, parallel: nn.Module) -> float:
        """Each weight against the largest of its tensor."""
        worst = 0.0
        for name, p, q in self.pairs(plain, parallel):
            scale = float(_numbers(p.detach()).abs().max()) if p.numel() else 1.0
            worst = max(worst, self.compare_tensor("weight", name, p.detach(), q.detach(), scale))
        return worst

    def pairs(
        self, plain: nn.Module, parallel: nn.Module
    ) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, plain, parallel) of all parameters; their names must be the same."""
        ours = dict(parallel.named_parameters(remove_duplicate=False))
        theirs = dict(plain.named_parameters(remove_duplicate=False))
        assert list(ours) == list(theirs), "the parallel model's parameter names differ"
        for name, param in theirs.items():
            yield name, param, ours[name]

    def compare_tensor(
        self, what: str, name: str, whole: torch.Tensor, parallel: torch.Tensor, scale: float
    ) -> float:
        """Largest difference of any rank's shard from its part of ``whole``, relative to ``scale``."""
        bound = self.run.weights if what == "weight" else self.run.grads
        worst = 0.0
        assert parallel.shape == whole.shape, f"{name}: {tuple(parallel.shape)}"
        for rank, box, local in shards_of(parallel):
            want = whole[box]
            assert local.shape == want.shape, (
                f"{what} of {name} on rank {rank}: shape {tuple(local.shape)}, its placements say "
                f"{tuple(want.shape)}"
            )
            if not local.numel():
                continue
            difference = float((_numbers(local) - _numbers(want)).abs().max()) / max(scale, 1e-30)
            self.check(what, name, rank, difference, bound)
            worst = max(worst, difference)
        return worst

    def check(self, what: str, name: str, rank: int, difference: float, bound: float) -> None:
        """Raises unless ``difference`` is within ``bound``; nan is not."""
        if not difference <= bound:
            raise AssertionError(
                f"{self.layout}, {self.name}: {what} of {name} on rank {rank} differs from the plain "
                f"model's by {difference:.3g} (relative), more than {bound:g}"
            )


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, bool) as numbers that can be subtracted."""
    return tensor if tensor.is_floating_point() else tensor.double()


def shards_of(tensor: torch.Tensor) -> Iterator[tuple[int, tuple[slice, ...], torch.Tensor]]:
    """(rank, box, local tensor) for this rank, or for every simulated one.

    The box says which part of the global tensor the placements give to the rank: for a plain
    tensor, the whole. Of a packed parameter a rank has several, one after another.
    """
    if not isinstance(tensor, DTensor):
        for rank, part in _by_rank(tensor):
            yield rank, tuple(slice(None) for _ in tensor.shape), part
        return
    mesh = tensor.device_mesh
    places = _coordinates(mesh)
    packed = isinstance(tensor, PackedDTensor)
    for rank, part in _by_rank(get_local_tensor(tensor)):
        if packed:
            shape, boxes = packed_boxes(tensor.shape, mesh.shape, places[rank], tensor.placements)
            assert part.shape == shape, f"rank {rank} holds {tuple(part.shape)}, not {shape}"
            yield from ((rank, each.slices, each.of(part)) for each in boxes)
            continue
        shape, offset = dtensor_shard_box(tensor.shape, mesh.shape, places[rank], tensor.placements)
        box = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        yield rank, box, part


def _coordinates(mesh: DeviceMesh) -> dict[int, list[int]]:
    """Where each rank is, also where it is in a sibling of this submesh."""
    names = mesh.mesh_dim_names
    root = root_mesh(mesh)
    ranks = root.mesh.flatten().tolist()
    places = dict(zip(ranks, map(list, itertools.product(*map(range, root.shape))), strict=True))
    if names is None or root.mesh_dim_names is None:
        return places
    axes = [root.mesh_dim_names.index(name) for name in names]
    return {rank: [place[axis] for axis in axes] for rank, place in places.items()}


def _by_rank(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    by_rank = tensors_by_rank(tensor)
    if by_rank is not None:
        yield from sorted(by_rank.items())
    else:
        yield (dist.get_rank() if dist.is_initialized() else 0), tensor
