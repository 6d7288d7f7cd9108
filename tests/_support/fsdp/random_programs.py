"""Random training runs as data, and running one: on the plain model and on simulated ranks."""

import copy
import re
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from _support.fsdp.random_models import (
    DTYPE,
    LOST,
    LOST_TERMS,
    Model,
    Part,
    RandomModel,
    apply,
    linear,
    lost,
    models,
    odd_models,
    weighted,
)
from _support.fsdp.wrapped import at_rest
from parallel3d import MeshLayout, MixedPrecisionPolicy, Parallel3dError, StateError, build_mesh
from parallel3d.fsdp import BackwardPrefetch, CommHookState, FSDPModule, reduce_scatter_hook
from parallel3d.fsdp.param import owner_at
from parallel3d.testing import LocalWorld, local_world, shards_of

# ---- as data ----


@dataclass(frozen=True)
class Micro:
    """One micro-batch.

    Attributes:
        kind: see ``Side.backward``; ``"changed N"``: parameter N changes before the backward.
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
    static: bool = False  # its buffers are at fixed addresses
    wire: bool = False  # gradients are sent in float32, unless a hook sends them

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if not self.wire or self.comm.hook:
            return MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        reduce_dtype = self.reduce_dtype or torch.float64
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, wire_dtype=torch.float32)

    @property
    def exact(self) -> bool:
        """Whether all of it is in float64."""
        policy = self.policy
        return self.model.exact and torch.float32 not in (policy.reduce_dtype, policy.wire_dtype)

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.exact else 1e-5


# ---- running it ----


Values = Callable[[torch.Tensor], torch.Tensor]  # random ones of the same shape and dtype


class Side:
    """The plain or the parallel model and what is done to it."""

    def __init__(self, model: Model, config: Config) -> None:
        self.model = model
        self.config = config
        self.is_parallel = any(isinstance(module, FSDPModule) for module in model.modules())
        make = torch.optim.AdamW if config.adamw and config.exact else torch.optim.SGD
        self.optimizer = make(model.parameters(), lr=1e-2)

    def freeze(self, numbers: tuple[int, ...]) -> None:
        """Freezes or unfreezes parameters, of those that can be trained; never the heads'."""
        names = [n for n in self.names() if not n.startswith(("a.", "b."))]
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
            LOST_TERMS.clear()
            a, b = self.model(x)
            parts = {"a": a.square().mean(), "b": b.square().sum()}
            value = sum(parts.values()) if micro.output == "both" else parts[micro.output]
            return sum(self.model.terms(), value) * scale

        first, second = inputs
        kind, _, number = micro.kind.partition(" ")
        if micro.kind == "one":
            losses = [loss(first)]
            losses[0].backward()
        elif kind == "changed":
            losses = [loss(first)]
            if self.is_parallel:
                self.change(int(number))
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

    def change(self, number: int) -> None:
        """As an optimizer does, which has the sharded Parameter, whatever is shown."""
        name, param = self.param(number)
        holder, _, attribute = name.rpartition(".")
        owner = owner_at(self.model.get_submodule(holder), attribute)
        if owner is not None:
            param = owner.sharded
        with torch.no_grad():
            param.mul_(1.25)

    def prepare(self, micro: Micro, inputs: list[torch.Tensor], values: Values) -> list[Any]:
        """What is done before a step, of ``ACTS`` alone or of ``BESIDE`` too; outputs of evaluations.

        Args:
            inputs: one of each rank on the plain side.
            values: gives both sides the same ones.
        """
        evaluated: list[Any] = []
        for what in micro.before:
            kind, _, number = what.rpartition(" ") if what[-1].isdigit() else (what, "", "0")
            if kind in BESIDE:
                if self.is_parallel:
                    BESIDE[kind](self, int(number), inputs[0])
            else:
                if self.is_parallel and any("shard" in w or "prefetch" in w for w in micro.before):
                    for unit in self.units:
                        unit.reshard()
                evaluated += ACTS[kind](self, int(number), inputs, values) or ()
        return evaluated

    @property
    def units(self) -> list[Any]:
        return [m for m in self.model.modules() if isinstance(m, FSDPModule)]

    def unit(self, number: int) -> Any:
        return self.units[number % len(self.units)]

    def names(self) -> list[str]:
        """Those of parameters that are computed with."""
        named = self.model.named_parameters()
        return [n for n, p in named if p.is_floating_point() and ".adapter." not in n]

    def param(self, number: int) -> tuple[str, nn.Parameter]:
        names = self.names()
        name = names[number % len(names)]
        return name, self.model.get_parameter(name)

    def params(self) -> list[nn.Parameter]:
        return [self.model.get_parameter(name) for name in self.names()]

    def places(self, number: int) -> Iterator[tuple[nn.Module, str]]:
        """Those of one parameter."""
        _, param = self.param(number)
        for module in list(self.model.modules()):
            for name, each in list(module._parameters.items()):
                if each is param:
                    yield module, name

    def leaf(self, number: int) -> Part:
        leaves = self.model.leaves
        return leaves[number % len(leaves)]

    def step(self, how: str | None) -> None:
        self.optimizer.step()
        self.clear(how)


tally: Counter[str] = Counter()  # of what has happened in all programs

# Of the parallel side alone: they change nothing. Each gets the side, a number and an input.


def no_grad(side: Side, number: int, x: torch.Tensor) -> None:
    with torch.no_grad():
        side.model(x)


def inference(side: Side, number: int, x: torch.Tensor) -> None:
    with torch.inference_mode():
        side.model(x)


EXCEPTIONS = (KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError)


def interrupt(side: Side, number: int, x: torch.Tensor) -> None:
    """In the forward of a module, before or after it."""
    modules = list(side.model.modules())
    module = modules[number // 8 % len(modules)]
    kind = EXCEPTIONS[number % 4]

    def raise_it(*_: Any) -> None:
        raise kind("a test's")

    register = module.register_forward_hook if number & 4 else module.register_forward_pre_hook
    handle = register(raise_it)
    try:
        side.model(x)
    except kind:
        tally[f"{kind.__name__} in forward"] += 1
    handle.remove()


def assign_wrong(side: Side, number: int, x: torch.Tensor) -> None:
    """A Parameter of another shape."""
    for module, name in side.places(number):
        param = getattr(module, name)
        if isinstance(param, DTensor):
            refused = nn.Parameter(torch.ones(*param.shape, 2, dtype=DTYPE))
            expect(
                "shape", lambda m=module, n=name, p=refused: setattr(m, n, p), "was replaced by one"
            )


def add_parameter(side: Side, number: int, x: torch.Tensor) -> None:
    """A trainable one of no unit."""
    leaf = side.leaf(number)
    leaf.extra = nn.Parameter(torch.ones(3, dtype=DTYPE))
    expect("extra", lambda: side.model(x), "is trainable, but no unit has it")
    del leaf.extra


def add_module(side: Side, number: int, x: torch.Tensor) -> None:
    leaf = side.leaf(number)
    leaf.add_module("beside", linear(leaf.width, leaf.width))
    expect("beside", lambda: side.model(x), "is trainable, but no unit has it")
    del leaf.beside


def replace_module(side: Side, number: int, x: torch.Tensor) -> None:
    modules = [(leaf, n) for leaf in side.model.leaves for n in ("up", "never") if hasattr(leaf, n)]
    if modules:
        leaf, name = modules[number % len(modules)]
        module = getattr(leaf, name)
        setattr(leaf, name, linear(leaf.width, leaf.size))
        expect(name, lambda: side.model(x), "is trainable, but no unit has it")
        setattr(leaf, name, module)


def expect(name: str, call: Callable[[], Any], text: str) -> None:
    """Whether ``call`` is refused, by an error with ``name`` and ``text`` in it."""
    try:
        call()
    except Parallel3dError as error:
        assert text in str(error) and name in str(error), error
        tally[f"refused: {text}"] += 1
    else:
        raise AssertionError(f"not refused: {text}")


BESIDE: dict[str, Callable[[Side, int, torch.Tensor], object]] = {
    "no_grad": no_grad,
    "inference": inference,
    "lost": lambda side, number, x: side.model(x),
    "unshard": lambda side, number, x: side.unit(number).unshard(),
    "prefetch": lambda side, number, x: side.unit(number).unshard(async_op=True),
    "reshard": lambda side, number, x: side.unit(number).reshard(),
    "interrupt": interrupt,
    "wrong shape": assign_wrong,
    "new parameter": add_parameter,
    "new module": add_module,
    "replaced module": replace_module,
}

# Of both sides.


def fail_in_backward(side: Side, number: int, inputs: list, values: Values) -> None:
    """An exception in the midst of a backward; then all gradients are cleared."""
    held = side.params() if number % 3 else None
    if side.is_parallel:
        modules = list(side.model.modules())
        module = modules[number // 4 % len(modules)]
        kind = EXCEPTIONS[number % 4]

        def raise_it(_: torch.Tensor) -> None:
            raise kind("a test's")

        def hook(_: nn.Module, args: Any, output: Any) -> None:
            for tensor in (output, *args):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(raise_it)

        handle = module.register_forward_hook(hook)
        a, b = side.model(inputs[0])
        handle.remove()
        try:
            (a.sum() + b.sum()).backward()
        except kind:
            tally["exceptions in backward"] += 1
        except StateError as error:
            if not (lost(side.config.model) and re.match(REFUSALS["lost"], str(error))):
                raise
    for param in held or side.model.parameters():
        param.grad = None
    if side.is_parallel:
        assert all(isinstance(p, DTensor) for p in side.params())


def assign_quietly(side: Side, number: int, inputs: list, values: Values) -> list[Any]:
    """The unit takes it when the next forward begins."""
    replace(side, number, values, lambda m, name, p: m._parameters.update({name: p}))
    return evaluate(side, number, inputs, values)


def replace(side: Side, number: int, values: Values, put: Callable[..., Any]) -> None:
    """The plain side's optimizer goes on with what it has, as the parallel one's does."""
    _, param = side.param(number)
    new = values(param)
    if side.is_parallel:
        given = nn.Parameter(new, requires_grad=param.requires_grad)
        for module, name in list(side.places(number)):
            put(module, name, given)
    else:
        param.data.copy_(new)
        param.grad = None


def scale_data(side: Side, number: int, inputs: list, values: Values) -> None:
    side.param(number)[1].data.mul_(1.5)


def copy_data(side: Side, number: int, inputs: list, values: Values) -> None:
    data = side.param(number)[1].data
    data.copy_(data * 0.5 + 0.25)


def foreach(side: Side, number: int, inputs: list, values: Values) -> None:
    torch._foreach_mul_([p.detach() for p in side.params()], 0.75)


def averaged(side: Side, number: int, inputs: list, values: Values) -> list[Any]:
    """Store, copy to, evaluate, restore, evaluate: as averages of weights are used."""
    params = side.params()
    stored = [p.detach().clone() for p in params]
    for param, value in zip(params, stored, strict=True):
        param.data.copy_(value * 0.9)
    outputs = evaluate(side, number, inputs, values)
    for param, value in zip(params, stored, strict=True):
        param.data.copy_(value)
    return outputs + evaluate(side, number, inputs, values)


def evaluate(side: Side, number: int, inputs: list, values: Values) -> list[Any]:
    with torch.no_grad():
        return [torch.cat([t.flatten() for t in side.model(x)]) for x in inputs]


def add_frozen(side: Side, number: int, inputs: list, values: Values) -> None:
    """A module that nobody trains."""
    leaf = side.leaf(number)
    adapter = nn.Linear(leaf.width, leaf.width, dtype=DTYPE, bias=False)
    adapter.weight = nn.Parameter(values(adapter.weight), requires_grad=False)
    leaf.adapter = adapter


ACTS: dict[str, Callable[[Side, int, list, Values], Any]] = {
    "broken backward": fail_in_backward,
    "assign": lambda side, number, inputs, values: replace(side, number, values, setattr),
    "assign quietly": assign_quietly,
    "data": scale_data,
    "data copy": copy_data,
    "foreach": foreach,
    "average": averaged,
    "evaluate": evaluate,
    "frozen module": add_frozen,
}

REFUSALS = {
    "lost": r"unit .+: a backward reads parameters of the unit while they are freed",
    "changed": r"unit .+: (its parameters|parameters that its forward has computed with) were changed",
}


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
            apply(parallel, mesh, config.policy)
            config.comm.apply(parallel)
            parallel.set_static_memory(config.static)
        self.parallel = Side(parallel, config)
        self.objects = self.parameters()
        self.boxes: dict[Any, list[tuple[slice, ...]]] = {}
        self.seen: list[tuple[str, torch.Tensor]] = []  # each number of the parallel side

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
            assert at_rest(self.parallel.model, but=self.added()), f"step {index}: not at rest"
        self.compare_weights()

    def added(self) -> list[nn.Parameter]:
        """What is in the parallel model that no unit has."""
        return [p for n, p in self.parallel.model.named_parameters() if ".adapter." in n]

    def parameters(self) -> list[int]:
        """Ids of the others."""
        added = set(map(id, self.added()))
        return [id(p) for p in self.parallel.model.parameters() if id(p) not in added]

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
        evaluated = self.plain.prepare(micro, list(inputs[0]), self.values(where))
        expected, wanted = [], []
        for rank in range(size):
            leaves = [self.leaf(x) for x in inputs[:, rank]]
            expected.append([v * size for v in self.plain.backward(micro, leaves, 1 / size)])
            wanted.append([None if x.grad is None else x.grad * size for x in leaves])
        if micro.kind.startswith("changed"):
            self.plain.change(int(micro.kind.split()[1]))
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
            outputs = self.parallel.prepare(micro, [leaves[0].detach()], self.values(where))
            try:
                losses = self.parallel.backward(micro, leaves, 1.0)
            except StateError as error:
                self.check_refused(micro, error)
                losses = None
            self.parallel.clear(micro.clear)
        for number, output in enumerate(outputs):
            for rank, got in enumerate(self.world.per_rank(output)):
                want = evaluated[number * size + by_rank[rank]]
                scale = float(want.abs().max())
                self.check(f"{where}: evaluation {number} on rank {rank}", got, want, scale)
        if losses is None:
            for side in self.both():
                side.clear("none")
            return
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

    def values(self, where: str) -> Values:
        """The same on both sides, and on all ranks."""
        generator = torch.Generator().manual_seed(zlib.crc32(where.encode()))

        def draw(like: torch.Tensor) -> torch.Tensor:
            with self.world.paused():
                values = torch.randn(like.shape, generator=generator, dtype=DTYPE) / 2
                return values.to(like.dtype)

        return draw

    def check_refused(self, micro: Micro, error: StateError) -> None:
        """Whether ``error`` is to be expected; else it is raised again."""
        kinds = ["changed"] if micro.kind.startswith("changed") else []
        kinds += ["lost"] if lost(self.config.model) else []
        for kind in kinds:
            if re.match(REFUSALS[kind], str(error)):
                tally[f"refused: {kind}"] += 1
                return
        raise error

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
        assert self.parameters() == self.objects
        for name, p, q in self.pairs():
            scale = float(p.detach().abs().max()) if p.numel() else 1.0
            self.compare(f"at the end: {name}", p.detach(), q.detach(), scale)

    def compare(self, what: str, whole: torch.Tensor, parallel: torch.Tensor, scale: float) -> None:
        assert parallel.shape == whole.shape and parallel.dtype == whole.dtype, what
        if not isinstance(parallel, DTensor):  # of no unit
            for rank, got in enumerate(self.world.per_rank(parallel)):
                self.check(f"{what} on rank {rank}", got, whole, scale)
            return
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
        self.seen.append((what, got.detach().clone()))
        if got.numel():
            difference = float((got.double() - want.double()).abs().max()) / max(scale, 1e-6)
            assert difference <= self.config.tolerance, f"{what}: {difference:.2g} apart"


def run(config: Config) -> list[tuple[str, torch.Tensor]]:
    """Raises where the parallel model isn't the plain one. Returns what was compared: (what, its numbers).

    The error is text alone: pytest would show what the frames hold, and reading a freed parameter crashes.
    """
    ranks = config.mesh[0] * config.mesh[1] * config.mesh[2]
    refusals = sum(tally[f"refused: {kind}"] for kind in REFUSALS)
    try:
        with local_world(ranks) as world, world.paused():
            comparison = Comparison(config, world)
            comparison.run()
        now = sum(tally[f"refused: {kind}"] for kind in REFUSALS)
        tally["programs with a backward refused" if now > refusals else "programs equal"] += 1
        return comparison.seen
    except Exception:
        why = traceback.format_exc()
        raise AssertionError(f"{why}\nconfiguration:\n{config}") from None
    finally:
        LOST.clear()
        LOST_TERMS.clear()


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
NUMBERED = ("unshard", "prefetch", "reshard")
acts = st.sampled_from(
    ["no_grad", "inference", "lost"] + [f"{act} {unit}" for act in NUMBERED for unit in range(3)]
)
odd_acts = st.builds(
    lambda act, number: f"{act} {number}",
    st.sampled_from([act for act in BESIDE if act not in ("no_grad", "inference")] + [*ACTS] * 2),
    st.integers(0, 99),
)
changes = st.builds(lambda number: f"changed {number}", st.integers(0, 11))


def micros_of(kinds: st.SearchStrategy[str], acts: st.SearchStrategy[str], most: int):
    return st.builds(
        Micro,
        kinds,
        st.sampled_from(["both", "both", "a", "b"]),
        st.booleans(),
        st.booleans(),
        numbers,
        st.lists(acts, max_size=most).map(tuple),
        st.sampled_from([None, None, None, "none", "zeros"]),
    )


def configs_of(models: st.SearchStrategy, micros: st.SearchStrategy, most: int):
    steps = st.builds(Step, st.lists(micros, min_size=1, max_size=2).map(tuple), numbers, clears)
    return st.builds(
        Config,
        models,
        st.sampled_from([*SMALL, *SMALL, *SMALL, *LARGE]),  # time goes by ranks
        st.lists(steps, min_size=2, max_size=most).map(tuple),
        numbers,
        st.booleans(),
        st.sampled_from([None, None, torch.float32]),
        st.booleans(),
        st.integers(0, 999),
        comms,
        st.booleans(),
        weighted((3, st.just(False)), (1, st.just(True))),
    )


comms = st.builds(
    Comm,
    st.booleans(),
    st.sampled_from([BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]),
    st.booleans(),
    st.sampled_from([None, None, 1, 2]),
)
kinds = st.sampled_from(KINDS)
configs = configs_of(models, micros_of(kinds, acts, 2), 2)
odd_kinds = weighted((8, kinds), (1, changes))
odd_configs = configs_of(odd_models, micros_of(odd_kinds, odd_acts, 3), 2)
