"""assert_parity: checks that a parallel model computes what the plain one does, on any mesh."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d import cp
from parallel3d._layout.packed import PackedDTensor, packed_boxes
from parallel3d._torch.dtensor import dtensor_shard_box, get_local_tensor, root_axes, root_mesh
from parallel3d._torch.simulated import ranks_are_simulated, tensors_by_rank
from parallel3d._util.trees import cast_floats
from parallel3d.audit.findings import Gap, gap_between
from parallel3d.fsdp import FSDPModule
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.mesh.axes import EXPERT
from parallel3d.mesh.joined import expert_view
from parallel3d.optim import accumulate
from parallel3d.parallelize import parallelize
from parallel3d.testing.samples import LossFn, Samples, cast_model
from parallel3d.testing.worlds import LocalWorld, local_world

Around = Callable[[int], AbstractContextManager[object]]
ShardBatch = Callable[[Any, DeviceMesh], Any]


@dataclass
class Parity:
    """The largest relative differences in one call of ``assert_parity``.

    Attributes:
        loss, grads, weights: by dtype name, such as ``{"float64": 1e-16}``.
    """

    loss: dict[str, float] = field(default_factory=dict)
    grads: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ParityRun:
    """One comparison of training runs: dtype, optimizer, tolerance of loss and gradients, and of weights."""

    dtype: torch.dtype
    optimizer: Callable[..., torch.optim.Optimizer]
    grads: float
    weights: float

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def adamw(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Returns AdamW; fused if possible, which DTensor dispatches once a step and not once per parameter."""
    params = list(params)
    fused = _may_be_fused(params)
    groups: dict[int, list[torch.Tensor]] = {}  # no kernel takes tensors of several meshes
    for param in params:
        mesh = id(param.device_mesh) if isinstance(param, DTensor) else 0
        groups.setdefault(mesh, []).append(param)
    return torch.optim.AdamW([{"params": g} for g in groups.values()], lr=1e-2, fused=fused)


def _may_be_fused(params: list[torch.Tensor]) -> bool:
    """Returns whether AdamW may be fused, on every rank: on CPU torch's fused kernel ignores strides, and the
    local tensor of a split row may have gaps."""
    locals_ = [get_local_tensor(p) if isinstance(p, DTensor) else p for p in params]
    fused = all(p.is_floating_point() and p.is_contiguous() for p in locals_)
    if not ranks_are_simulated() and any(isinstance(p, DTensor) for p in params):
        agreed = torch.tensor([float(fused)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed.item())
    return fused


def sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Returns SGD, which does not amplify rounding."""
    return torch.optim.SGD(params, lr=1e-2)


_EXACT = 1e-8


def runs_of(tolerance: float = 1e-9, fp32: bool = True) -> tuple[ParityRun, ...]:
    """Returns the dtypes, optimizers and tolerances with which ``assert_parity`` trains."""
    # AdamW divides a gradient by its own size: a step from a gradient that is only rounding is as large as
    # any.
    exact = tolerance <= _EXACT
    double = ParityRun(torch.float64, adamw if exact else sgd, tolerance, 10 * tolerance)
    single = ParityRun(torch.float32, sgd, 1e-5, 1e-5)
    return (double, single) if fp32 else (double,)


def assert_parity(
    build: Callable[[], nn.Module],
    batch: Any,
    layout: MeshLayout,
    *,
    loss: LossFn | None = None,
    steps: int = 5,
    micro_batches: int = 1,
    defer: str = "all_reduce",
    apply: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    shard_batch: ShardBatch | None = None,
    fp32: bool = True,
    tolerance: float = 1e-9,
    seed: int = 0,
    **options: Any,
) -> Parity:
    """Trains the plain and the parallel model side by side and compares them.

    In float64 with AdamW, loss and gradients (relative to the model's largest gradient) after the first step
    must agree within 1e-9 and weights after ``steps`` steps within 1e-8; in float32 with SGD all within 1e-5.
    Every rank's shard is compared with the part of the plain tensor that its placements name, which also
    detects wrong placements.

    Without a process group the ranks are simulated in this process; within one (gloo processes, or torchrun)
    every rank calls this and compares its own shards.

    Args:
        build: makes the plain model; called after ``torch.manual_seed(seed)``.
        batch: a function that returns the inputs of sample ``i``, of which each data rank, micro-batch and
            step gets one: a tensor, a tuple of tensors, or a dict of keyword arguments; floating-point ones
            are cast. Or a batch itself, or a function without arguments that returns one: data ranks and
            micro-batches get parts of its rows (dim 0). None: inputs are made, if the model's config or its
            first layer says which.
        layout: the mesh, resolved.
        loss: ``loss(model, *inputs)``, or for a dict ``loss(model, **inputs)``, -> scalar. By default the
            output's ``loss`` (an attribute or dict entry), the output itself if it is a scalar, or the mean
            square of its first floating-point tensor.
        steps: number of optimizer steps.
        micro_batches: micro-batches per step.
        defer: what all micro-batches but the last defer: ``"all_reduce"`` (``optim.accumulate``), ``"sync"``
            (``set_requires_gradient_sync``) or ``"nothing"``.
        apply: makes the model parallel; by default ``parallelize(model, mesh, **options)``.
        shard_batch: ``shard_batch(inputs, mesh)`` returns a cp rank's part of its data rank's inputs, a tuple
            or a dict. The default is ``p3d.cp.shard_batch`` if ``parallelize`` has found the model's
            attention; with ``apply`` each cp rank gets the whole inputs. The plain model's loss is compared
            with the mean of the losses of the cp ranks.
        fp32: whether to run in float32 too.
        tolerance: tolerance of loss and gradients in float64; that of weights is ten times as large. Above
            1e-8, for models that compute something in float32 themselves, the float64 run uses SGD too.
        seed: seed of the initial weights.
        options: for ``parallelize``, such as ``tp_plan``.

    Raises:
        AssertionError: naming the tensor, rank and difference that are out of tolerance.
        Parallel3dError: ``batch`` can't be what the model trains on.
    """
    shard_batch = shard_batch or default_shard_batch(layout, apply)
    apply = apply or (lambda model, mesh: parallelize(model, mesh, **options))
    samples = Samples(batch, build, layout.data_size * micro_batches)
    loss = samples.loss_of(loss)
    setup = Setup(build, samples, layout, loss, apply, micro_batches, defer, seed, shard_batch)
    return compare(setup, runs_of(tolerance, fp32), steps)


def default_shard_batch(layout: MeshLayout, apply: Any) -> ShardBatch | None:
    """Returns the ``shard_batch`` to use if the user gives none; None without cp."""
    return cp.shard_batch if apply is None and layout.cp > 1 else None


def outside(world: LocalWorld | None) -> AbstractContextManager[None]:
    """Context manager that suspends the simulation, if ranks are simulated."""
    return nullcontext() if world is None else world.paused()


def inside(world: LocalWorld | None) -> AbstractContextManager[None]:
    """Context manager that resumes the simulation within ``outside``."""
    return nullcontext() if world is None else world.resumed()


@dataclass(frozen=True)
class Setup:
    """How to make both models and train them: the arguments of ``assert_parity``."""

    build: Callable[[], nn.Module]
    batch: Samples
    layout: MeshLayout
    loss: LossFn
    apply: Callable[[nn.Module, DeviceMesh], nn.Module]
    micro_batches: int
    defer: str
    seed: int
    shard_batch: ShardBatch | None = None

    @contextmanager
    def case(self, run: ParityRun) -> Iterator["Case"]:
        """Builds both models and yields them as a Case; simulates ranks if there is no process group."""
        torch.manual_seed(self.seed)
        plain = cast_model(self.build(), run.dtype)
        parallel = copy.deepcopy(plain)
        real = dist.is_initialized()
        simulated = nullcontext() if real else local_world(self.layout.world_size)
        with simulated as world, outside(world):
            with inside(world):
                mesh = build_mesh(self.layout, device_type="cpu")
                parallel = self.apply(parallel, mesh)
            yield Case(self, run, world, mesh, plain, parallel)


def compare(setup: Setup, runs: Sequence[ParityRun], steps: int) -> Parity:
    result = Parity()
    for run in runs:
        with setup.case(run) as case:
            case.compare(steps)
        kinds = ("loss", result.loss), ("gradient", result.grads), ("weight", result.weights)
        for what, by_dtype in kinds:
            by_dtype[run.name] = case.worst.get(what, 0.0)
    return result


@dataclass
class Case:
    """Both models in one run. Its methods run with the simulation suspended, unless they say otherwise."""

    setup: Setup
    run: ParityRun
    world: LocalWorld | None
    mesh: DeviceMesh
    plain: nn.Module
    parallel: nn.Module
    worst: dict[str, float] = field(default_factory=dict)  # largest differences, see ``compare``

    def inputs(self, step: int, micro: int, data_rank: int) -> tuple[torch.Tensor, ...]:
        size = self.setup.layout.data_size
        number = (step * self.setup.micro_batches + micro) * size + data_rank
        return cast_floats(self.setup.batch(number), self.run.dtype)

    def parallel_inputs(self, step: int, micro: int) -> tuple[Any, ...]:
        """Returns the inputs of this rank, or of all simulated ranks. Called in the simulation."""
        inputs, shard_batch = self._whole_inputs(step, micro), self.setup.shard_batch
        return self.setup.batch.cut(inputs, shard_batch, self.mesh) if shard_batch else inputs

    def _whole_inputs(self, step: int, micro: int) -> tuple[torch.Tensor, ...]:
        if self.world is None:
            return self.inputs(step, micro, self.setup.layout.data_rank(dist.get_rank()))
        with self.world.paused():
            by_rank = [
                self.inputs(step, micro, self.setup.layout.data_rank(rank))
                for rank in range(self.setup.layout.world_size)
            ]
        by_input = list(zip(*by_rank, strict=True))
        return tuple(self.world.map(tensors.__getitem__) for tensors in by_input)

    def compare(self, steps: int) -> None:
        optimizers = self.optimizers()
        objects = [id(p) for p in self.parallel.parameters()]
        for step in range(steps):
            plain_losses = self.plain_step(step)
            with inside(self.world):
                parallel_losses = list(self.parallel_step(step))
            if step == 0:
                self._compare_losses(plain_losses, parallel_losses)
                self._compare_tensors("gradient")
            self.update(optimizers)
        assert objects == [id(p) for p in self.parallel.parameters()], "parameters were replaced"
        self._compare_tensors("weight")

    def plain_step(self, step: int, around: Around = nullcontext) -> list[dict[int, torch.Tensor]]:
        """Runs the plain model's backward of the mean loss over all samples; each forward is within
        ``around(data_rank)``.

        Returns the losses by micro-batch and data rank.
        """
        count = self.setup.layout.data_size * self.setup.micro_batches
        losses: list[dict[int, torch.Tensor]] = [{} for _ in range(self.setup.micro_batches)]
        for data_rank in range(self.setup.layout.data_size):
            for micro, by_rank in enumerate(losses):
                with around(data_rank):
                    loss = self.setup.loss(self.plain, *self.inputs(step, micro, data_rank))
                (loss / count).backward()
                by_rank[data_rank] = loss.detach()
        return losses

    def parallel_step(self, step: int, around: Around = nullcontext) -> Iterator[torch.Tensor]:
        """Runs one step; yields each micro-batch's loss after its backward. Called in the simulation."""
        model = self.parallel
        indices: Iterable[int] = range(self.setup.micro_batches)
        sharded = any(isinstance(m, FSDPModule) for m in model.modules())
        if self.setup.defer == "all_reduce" and sharded:
            indices = accumulate(model, indices)
        for micro in indices:
            if self.setup.defer == "sync":
                last = micro == self.setup.micro_batches - 1
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with around(step):
                loss = self.setup.loss(model, *self.parallel_inputs(step, micro))
            (loss / self.setup.micro_batches).backward()
            yield self._over_cp(loss.detach())

    def _over_cp(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the mean of the cp ranks' losses, each of which is that of a part of the sequences."""
        size = self.setup.layout.cp
        if size == 1:
            return loss
        loss = loss.clone()
        dist.all_reduce(loss, group=self.mesh.get_group("cp"))
        return loss / size

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.run.optimizer(model.parameters()) for model in (self.plain, self.parallel)]

    def update(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer, world in zip(optimizers, (None, self.world), strict=True):
            with inside(world):
                optimizer.step()
                optimizer.zero_grad()

    # -- comparisons ---------------------------------------------------------------------------------

    def _compare_losses(
        self, plain: list[dict[int, torch.Tensor]], parallel: list[torch.Tensor]
    ) -> None:
        """Compares each rank's loss with the plain model's loss of the same sample."""
        for expected, losses in zip(plain, parallel, strict=True):
            for rank, loss in _by_rank(losses):
                want = expected[self.setup.layout.data_rank(rank)]
                gap = gap_between(want, loss, self.run.grads, 1e-30)
                self._check("loss", "loss", rank, replace(gap, factor=None), self.run.grads)

    def _compare_tensors(self, what: str) -> None:
        """Compares each weight, relative to its own largest value, or (``what``) each gradient, relative to
        the model's largest gradient, as the exact gradient of a key bias is zero."""
        plain, parallel = (
            {
                name: p.grad if what == "gradient" else p.detach()
                for name, p in model.named_parameters(remove_duplicate=False)
            }
            for model in (self.plain, self.parallel)
        )
        assert list(parallel) == list(plain), "the parallel model's parameter names differ"
        known = {name: t for name, t in plain.items() if t is not None and t.numel()}
        largest = {name: float(t.double().abs().max()) for name, t in known.items()}
        if what == "gradient":
            largest = dict.fromkeys(largest, max(largest.values()))
        for name, whole in plain.items():
            part = parallel[name]
            assert (whole is None) == (part is None), f"{name}: only one side has a gradient"
            if whole is not None and part is not None:
                self._compare_tensor(what, name, whole, part, largest.get(name, 1.0))

    def _compare_tensor(
        self, what: str, name: str, whole: torch.Tensor, parallel: torch.Tensor, scale: float
    ) -> None:
        """Compares each rank's shard with its part of ``whole``, relative to ``scale``."""
        assert parallel.shape == whole.shape, f"{name}: {tuple(parallel.shape)}"
        for rank, box, local in shards_of(parallel):
            want = whole[box]
            assert local.shape == want.shape, (
                f"{what} of {name} on rank {rank}: shape {tuple(local.shape)}, its placements say "
                f"{tuple(want.shape)}"
            )
            bound = self.run.weights if what == "weight" else self.run.grads
            self._check(what, name, rank, gap_between(want, local, bound, scale), bound)

    def _check(self, what: str, name: str, rank: int, gap: Gap, bound: float) -> None:
        """Notes a difference, and raises AssertionError if it is above ``bound``."""
        if not gap.difference <= bound:
            times = gap.times(self.setup.layout.as_dict(views=True))
            raise AssertionError(
                f"{self.setup.layout}, {self.run.name}: {what} of {name} on rank {rank} differs from the "
                f"plain model's by {gap.difference:.3g} (relative), more than {bound:g}{times}"
            )
        self.worst[what] = max(self.worst.get(what, 0.0), gap.difference)


def shards_of(tensor: torch.Tensor) -> Iterator[tuple[int, tuple[slice, ...], torch.Tensor]]:
    """Yields (rank, box, local tensor) of ``tensor`` for this rank, or for every simulated one.

    The box is the part of the global tensor that the placements give to the rank; for a plain tensor it is
    the whole. A rank has several boxes of a packed parameter, which are yielded one after another.
    """
    if not isinstance(tensor, DTensor):
        for rank, part in _by_rank(tensor):
            yield rank, tuple(slice(None) for _ in tensor.shape), part
        return
    mesh = tensor.device_mesh
    coordinates = _coordinates(mesh)
    for rank, part in _by_rank(get_local_tensor(tensor)):
        where = (tensor.shape, mesh.shape, coordinates[rank], tensor.placements)
        if isinstance(tensor, PackedDTensor):
            shape, boxes = packed_boxes(*where)
            assert part.shape == shape, f"rank {rank} holds {tuple(part.shape)}, not {shape}"
            yield from ((rank, box.slices, box.of(part)) for box in boxes)
        else:
            shape, offset = dtensor_shard_box(*where)
            yield rank, tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True)), part


def _coordinates(mesh: DeviceMesh) -> dict[int, list[int]]:
    """Returns rank -> its coordinates on the axes of ``mesh``, for all ranks of the root mesh."""
    root, view = root_mesh(mesh), expert_view(mesh)
    ranks = root.mesh.flatten().tolist()
    places = dict(zip(ranks, map(list, itertools.product(*map(range, root.shape))), strict=True))
    if view is not None and (mesh.mesh_dim_names or ())[-1] == EXPERT.name:
        # The innermost axes of the root, cut another way.
        copy, ep = mesh.size() // mesh.size(0) if mesh.ndim == 3 else mesh.size(), view.ep.size()
        return {
            rank: [i // copy, i % copy // ep, i % ep][-mesh.ndim :] for i, rank in enumerate(ranks)
        }
    positions = root_axes(mesh)
    if positions is None:
        return places
    strides = [
        [prod(root.shape[j] for j in axis[i + 1 :]) for i in range(len(axis))] for axis in positions
    ]

    def on_axes(place: list[int]) -> list[int]:
        parts = zip(positions, strides, strict=True)
        return [sum(place[i] * s for i, s in zip(*each, strict=True)) for each in parts]

    return {rank: on_axes(place) for rank, place in places.items()}


def _by_rank(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    by_rank = tensors_by_rank(tensor)
    if by_rank is not None:
        yield from sorted(by_rank.items())
    else:
        yield (dist.get_rank() if dist.is_initialized() else 0), tensor
