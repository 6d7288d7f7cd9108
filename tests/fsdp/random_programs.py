"""Random training runs as data, and running one: on the plain model and on simulated ranks."""

import copy
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from random_models import DTYPE, Model, RandomModel, apply, models, tree
from torch import nn
from wrapped import at_rest

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import BackwardPrefetch, CommHookState, FSDPModule, reduce_scatter_hook
from parallel3d.testing import LocalWorld, local_world, shards_of

__all__ = ["Config", "configs", "run"]

# ---- as data ----


@dataclass(frozen=True)
class Micro:
    """One micro-batch.

    Attributes:
        kind: see ``Side.backward``.
        output: what the loss reads: ``"a"``, ``"b"`` or ``"both"``.
        sync, all_reduce: the switches; both are on in a step's last micro-batch.
        skip: leaves that this micro-batch doesn't use, modulo their count.
        before: what the user does first, see ``Side.prepare``.
        clear: how gradients are cleared after it: ``"none"``, ``"zeros"``, or not at all.
    """

    kind: str = "one"
    output: str = "both"
    sync: bool = True
    all_reduce: bool = True
    skip: tuple[int, ...] = ()
    before: tuple[str, ...] = ()
    clear: str | None = None


@dataclass(frozen=True)
class Step:
    """Micro-batches and an optimizer step.

    Attributes:
        flips: parameters frozen or unfrozen first, modulo their count.
        clear: how gradients are cleared after it.
    """

    micros: tuple[Micro, ...] = (Micro(),)
    flips: tuple[int, ...] = ()
    clear: str | None = "none"


@dataclass(frozen=True)
class Comm:
    """How the parallel model communicates, which changes nothing either.

    Attributes:
        hook: whether an averaging communication hook reduces gradients.
        backward: when backwards prefetch.
        forward: whether forwards do.
        limit: how many units at a time.
    """

    hook: bool = False
    backward: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward: bool = True
    limit: int | None = None

    def apply(self, model: Any) -> None:
        if self.hook:
            model.register_comm_hook(CommHookState(), reduce_scatter_hook)
        model.set_backward_prefetch(self.backward)
        model.set_forward_prefetch(self.forward)
        model.set_limit_all_gathers(self.limit)


@dataclass(frozen=True)
class Config:
    """A model, its mesh and a training run."""

    model: RandomModel
    mesh: tuple[int, int, int]
    steps: tuple[Step, ...]
    frozen: tuple[int, ...] = ()
    adamw: bool = False
    reduce_dtype: torch.dtype | None = None
    input_grad: bool = False
    seed: int = 0
    comm: Comm = Comm()

    @property
    def exact(self) -> bool:
        """Whether all of it is in float64."""
        return self.model.exact and self.reduce_dtype is not torch.float32

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.exact else 1e-5

    def __str__(self) -> str:
        lines = [
            f"mesh (replicate, shard, tp) {self.mesh}, seed {self.seed}, frozen {self.frozen}",
            f"adamw {self.adamw}, reduce_dtype {self.reduce_dtype}, input_grad {self.input_grad}",
            f"{self.comm}",
            tree(self.model),
        ]
        for index, step in enumerate(self.steps):
            lines.append(f"step {index}: flips {step.flips}, clear {step.clear}")
            lines += [f"  {micro}" for micro in step.micros]
        return "\n".join(lines)


# ---- running it ----


class Side:
    """The plain or the parallel model and what is done to it."""

    def __init__(self, model: Model, config: Config) -> None:
        self.model = model
        self.config = config
        make = torch.optim.AdamW if config.adamw and config.exact else torch.optim.SGD
        self.optimizer = make(model.parameters(), lr=1e-2)

    def freeze(self, numbers: tuple[int, ...]) -> None:
        """Freezes or unfreezes parameters, of those that can be trained; never the heads'."""
        names = [n for n, p in self.model.named_parameters() if p.is_floating_point()]
        heads = ("a.", "b.")
        names = [n for n in names if not n.startswith(heads)]
        for number in numbers:
            if names:
                param = self.model.get_parameter(names[number % len(names)])
                param.requires_grad_(not param.requires_grad)

    def skip(self, numbers: tuple[int, ...]) -> None:
        leaves = self.model.leaves
        skipped = {number % len(leaves) for number in numbers}
        for index, leaf in enumerate(leaves):
            leaf.skip = index in skipped

    def clear(self, how: str | None) -> None:
        if how is not None:
            self.model.zero_grad(set_to_none=how == "none")

    def backward(
        self, micro: Micro, inputs: list[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        """Forwards and backwards of one micro-batch; the losses."""

        def loss(x: torch.Tensor) -> torch.Tensor:
            a, b = self.model(x)
            parts = {"a": a.square().mean(), "b": b.square().sum()}
            value = sum(parts.values()) if micro.output == "both" else parts[micro.output]
            return value * scale

        first, second = inputs
        if micro.kind == "one":
            losses = [loss(first)]
            losses[0].backward()
        elif micro.kind == "backward twice":
            losses = [loss(first)]
            losses[0].backward(retain_graph=True)
            losses[0].backward()
        else:
            losses = [loss(first), loss(second)]
            if micro.kind == "two forwards, one backward":
                (losses[0] + losses[1]).backward()
            else:
                order = losses[::-1] if "reversed" in micro.kind else losses
                for value in order:
                    value.backward()
        return [value.detach() for value in losses]

    def prepare(self, micro: Micro, x: torch.Tensor) -> None:
        """What the user of a parallel model may do before a step, and changes nothing."""
        units = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for what in micro.before:
            kind, _, number = what.partition(" ")
            unit = units[int(number or 0) % len(units)]
            if kind == "no_grad":
                with torch.no_grad():
                    self.model(x)
            elif kind == "inference":
                with torch.inference_mode():
                    self.model(x)
            elif kind == "lost":
                self.model(x)
            elif kind == "unshard":
                unit.unshard()
            elif kind == "prefetch":
                unit.unshard(async_op=True)
            else:
                unit.reshard()

    def step(self, how: str | None) -> None:
        self.optimizer.step()
        self.clear(how)


class Comparison:
    """One configuration on both sides. Runs paused; parallel work inside ``world.resumed()``."""

    def __init__(self, config: Config, world: LocalWorld) -> None:
        self.config, self.world = config, world
        self.layout = MeshLayout(*config.mesh)
        torch.manual_seed(config.seed)
        model = Model(config.model)
        self.plain = Side(model, config)
        self.plain.freeze(config.frozen)
        parallel = copy.deepcopy(model)
        with world.resumed():
            mesh = build_mesh(self.layout, device_type="cpu")
            apply(parallel, mesh, config.reduce_dtype)
            config.comm.apply(parallel)
        self.parallel = Side(parallel, config)
        self.objects = [id(p) for p in parallel.parameters()]
        self.boxes: dict[Any, list[tuple[slice, ...]]] = {}

    def run(self) -> None:
        for index, step in enumerate(self.config.steps):
            for side in self.both():
                side.freeze(step.flips)
            for number, micro in enumerate(step.micros):
                last = number == len(step.micros) - 1
                self.micro(f"step {index}, micro-batch {number}", micro, last=last)
            self.compare_grads(f"step {index}")
            for side in self.both():
                side.step(step.clear)
            assert at_rest(self.parallel.model), f"step {index}: not at rest"
        self.compare_weights()

    def both(self) -> Iterator[Side]:
        yield self.plain
        with self.world.resumed():
            yield self.parallel

    def micro(self, where: str, micro: Micro, *, last: bool) -> None:
        size = self.layout.data_size
        generator = torch.Generator().manual_seed(zlib.crc32(where.encode()))
        shape = (2, size, 2, self.config.model.width)  # input, rank, rows
        inputs = torch.randn(*shape, generator=generator, dtype=DTYPE)
        self.plain.skip(micro.skip)
        expected, wanted = [], []
        for rank in range(size):
            leaves = [self.leaf(x) for x in inputs[:, rank]]
            expected.append([v * size for v in self.plain.backward(micro, leaves, 1 / size)])
            wanted.append([None if x.grad is None else x.grad * size for x in leaves])
        self.plain.clear(micro.clear)

        model = self.parallel.model
        with self.world.resumed():
            self.parallel.skip(micro.skip)
            model.set_requires_gradient_sync(micro.sync or last)
            model.set_requires_all_reduce(micro.all_reduce or last)
            by_rank = [self.layout.data_rank(rank) for rank in range(self.layout.world_size)]
            leaves = [
                self.leaf(self.world.map(lambda rank, x=x: x[by_rank[rank]].clone()))
                for x in inputs
            ]
            self.parallel.prepare(micro, leaves[0].detach())
            losses = self.parallel.backward(micro, leaves, 1.0)
            self.parallel.clear(micro.clear)
        for number, loss in enumerate(losses):
            for rank, value in enumerate(self.world.per_rank(loss)):
                want = expected[by_rank[rank]][number]
                self.check(f"{where}: loss on rank {rank}", value, want, float(want.abs()))
        for number, leaf in enumerate(leaves):
            for rank in range(self.layout.world_size):
                want = wanted[by_rank[rank]][number]
                assert (want is None) == (leaf.grad is None), f"{where}: input's gradient"
                if want is not None:
                    got = self.world.per_rank(leaf.grad)[rank]
                    self.check(f"{where}: input's gradient", got, want, float(want.abs().max()))

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        return x.requires_grad_() if self.config.input_grad else x

    # -- comparisons ---------------------------------------------------------------------------------

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        theirs = dict(self.plain.model.named_parameters(remove_duplicate=False))
        ours = dict(self.parallel.model.named_parameters(remove_duplicate=False))
        assert list(theirs) == list(ours)
        for name, param in theirs.items():
            yield name, param, ours[name]

    def compare_grads(self, where: str) -> None:
        grads = [p.grad for p in self.plain.model.parameters() if p.grad is not None]
        scale = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
        for name, p, q in self.pairs():
            assert p.requires_grad == q.requires_grad, f"{where}: requires_grad of {name}"
            one_side = (p.grad is None) != (q.grad is None)
            assert not one_side, f"{where}: gradient of {name}: {p.grad}, parallel {q.grad}"
            if p.grad is not None:
                self.compare(f"{where}: gradient of {name}", p.grad, q.grad, scale)

    def compare_weights(self) -> None:
        assert [id(p) for p in self.parallel.model.parameters()] == self.objects
        for name, p, q in self.pairs():
            scale = float(p.detach().abs().max()) if p.numel() else 1.0
            self.compare(f"at the end: {name}", p.detach(), q.detach(), scale)

    def compare(self, what: str, whole: torch.Tensor, parallel: torch.Tensor, scale: float) -> None:
        assert parallel.shape == whole.shape and parallel.dtype == whole.dtype, what
        key = (parallel.shape, parallel.placements)  # all are on one mesh
        if key not in self.boxes:
            self.boxes[key] = [box for _, box, _ in shards_of(parallel)]
        shards = zip(self.boxes[key], self.world.per_rank(parallel), strict=True)
        for rank, (box, local) in enumerate(shards):
            self.check(f"{what} on rank {rank}", local, whole[box], scale)

    def check(self, what: str, got: torch.Tensor, want: torch.Tensor, scale: float) -> None:
        assert got.shape == want.shape, (
            f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
        )
        if got.numel():
            difference = float((got.double() - want.double()).abs().max()) / max(scale, 1e-6)
            assert difference <= self.config.tolerance, f"{what}: {difference:.2g} apart"


def run(config: Config) -> None:
    """Raises where the parallel model isn't the plain one.

    The error is text alone: pytest would show what the frames hold, and reading a freed parameter crashes.
    """
    ranks = config.mesh[0] * config.mesh[1] * config.mesh[2]
    try:
        with local_world(ranks) as world, world.paused():
            Comparison(config, world).run()
    except Exception:
        why = traceback.format_exc()
        raise AssertionError(f"{why}\nconfiguration:\n{config}") from None


# ---- strategies ----

SMALL = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 3, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
LARGE = [(1, 4, 1), (3, 2, 1), (2, 3, 1), (1, 3, 2), (1, 2, 3), (1, 4, 2), (2, 2, 2)]
KINDS = [
    "one",
    "two forwards, one backward",
    "two forwards, two backwards",
    "two forwards, two backwards, reversed",
    "backward twice",
]
clears = st.sampled_from(["none", "zeros", None])
numbers = st.lists(st.integers(0, 11), max_size=3).map(tuple)
acts = st.sampled_from(
    ["no_grad", "inference", "lost"]
    + [f"{act} {unit}" for act in ("unshard", "prefetch", "reshard") for unit in range(3)]
)
micros = st.builds(
    Micro,
    st.sampled_from(KINDS),
    st.sampled_from(["both", "both", "a", "b"]),
    st.booleans(),
    st.booleans(),
    numbers,
    st.lists(acts, max_size=2).map(tuple),
    st.sampled_from([None, None, None, "none", "zeros"]),
)
steps = st.builds(Step, st.lists(micros, min_size=1, max_size=2).map(tuple), numbers, clears)
comms = st.builds(
    Comm,
    st.booleans(),
    st.sampled_from([BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]),
    st.booleans(),
    st.sampled_from([None, None, 1, 2]),
)
configs = st.builds(
    Config,
    models,
    st.sampled_from([*SMALL, *SMALL, *SMALL, *LARGE]),  # time goes by ranks
    st.lists(steps, min_size=2, max_size=2).map(tuple),
    numbers,
    st.booleans(),
    st.sampled_from([None, None, torch.float32]),
    st.booleans(),
    st.integers(0, 999),
    comms,
)
