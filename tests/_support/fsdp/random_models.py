"""Random models as data, the modules that the data describes, and how they are made parallel."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel3d import MixedPrecisionPolicy, tp
from parallel3d.fsdp import fully_shard

DTYPE = torch.float64

# ---- as data ----


@dataclass(frozen=True)
class Unit:
    """Arguments of ``fully_shard``. ``reshard`` 2: where the shard axis has a multiple of that."""

    reshard: bool | int | None = None
    dim1: bool = False
    hybrid: bool = False


@dataclass(frozen=True)
class Leaf:
    """A module of ``LEAVES``.

    Attributes:
        aux: what its forward leaves a loss term in, of ``WRAPS``: on an attribute, or ``"lost"``.
        output: what it returns its output in, of ``WRAPS``, or ``"lost"``.
    """

    kind: str
    size: int = 3
    unit: Unit | None = None
    aux: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class Again:
    """The leaf of that number, modulo their count so far, once more: the same module."""

    leaf: int


@dataclass(frozen=True)
class Block:
    """Parts one after another.

    Attributes:
        as_list: its own parts that are no units yet are one, given as a list.
        checkpoint: ``"around"``, ``"around, reentrant"``: its call is; ``"within"``: its forward is.
    """

    parts: tuple["Leaf | Again | Block", ...]
    unit: Unit | None = None
    as_list: bool = False
    checkpoint: str | None = None
    residual: bool = False


@dataclass(frozen=True)
class RandomModel:
    """Parts, then two heads, each its own output."""

    parts: tuple[Leaf | Again | Block, ...]
    width: int = 3
    root: Unit = Unit()
    heads: Unit | None = None

    @property
    def exact(self) -> bool:
        """Whether all of it computes in float64."""
        return not any(isinstance(p, Leaf) and p.kind == "float32" for p in _walk(self.parts))


def _walk(parts: tuple) -> Iterator[Leaf | Again | Block]:
    for part in parts:
        yield part
        if isinstance(part, Block):
            yield from _walk(part.parts)


def lost(model: RandomModel) -> bool:
    """Whether anything that is computed goes where the engine can't see it."""
    parts = (part for part in _walk(model.parts) if isinstance(part, Leaf))
    return any("lost" in (part.aux, part.output) for part in parts)


# ---- modules ----


LOST: list[torch.Tensor] = []  # outputs, which neither a module nor what it returns refers to
LOST_TERMS: list[torch.Tensor] = []  # the same of loss terms


@dataclass
class Fields:
    held: Any


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Object:
    def __init__(self, held: Any) -> None:
        self.held = held


def items(held: Any) -> Iterator[Any]:
    yield held


WRAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "list": lambda t: [t],
    "dict": lambda t: {"held": (t,)},
    "dataclass": Fields,
    "slots": Slots,
    "object": Object,
    "object in a list": lambda t: [Object([t])],
}
OUTPUTS = WRAPS | {
    "objects": lambda t: Object(Slots(Fields(t))),
    "closure": lambda t: lambda: t,
    "generator": items,
    "iterator": lambda t: iter([t]),
}


def held_in(value: Any) -> torch.Tensor:
    """The tensor in any of these."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FunctionType):
        return value()
    if hasattr(value, "held"):
        return held_in(value.held)
    return held_in(next(iter(value.values() if isinstance(value, Mapping) else value)))


def linear(width_in: int, width_out: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=bias, dtype=DTYPE)


class Part(nn.Module):
    """Passes its input on where ``skip`` is set: then its parameters are unused.

    Attributes:
        spec: says what it returns, and leaves on ``aux``.
        adapter: a module put in later, whose output is added.
    """

    skip = False
    spec = Leaf("")

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.width, self.size = width, size
        self.aux: Any = None
        self.adapter: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.aux = None
        if self.skip:
            return x
        if self.spec.aux is not None and self.size % 2:
            self.leave(x)
        y = self.run(x)
        if self.spec.aux is not None and not self.size % 2:
            self.leave(y)
        if self.adapter is not None:
            y = y + self.adapter(x)
        if self.spec.output is None:
            return y
        if self.spec.output == "lost":
            LOST.append(y)
            return None
        return OUTPUTS[self.spec.output](y)

    def leave(self, x: torch.Tensor) -> None:
        """Leaves a loss term, whose backward reads the parameters."""
        term = self.run(torch.tanh(x)).square().mean()
        if self.spec.aux == "lost":
            LOST_TERMS.append(term)
        else:
            self.aux = WRAPS[self.spec.aux](term)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Mlp(Part):
    """Tensor-parallel where there is such an axis and each rank gets a row."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.up, self.down = linear(width, size), linear(size, width)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Lone(Mlp):
    """Without biases; where it is a unit, each of its linears is one: a parameter alone."""

    def __init__(self, width: int, size: int) -> None:
        Part.__init__(self, width, size)
        self.up, self.down = linear(width, size, bias=False), linear(size, width, bias=False)


class Scale(Part):
    """A parameter without dims."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=DTYPE))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Square(Part):
    """A matrix, shared with the first of its kind if ``tied``; not contiguous."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.weight = nn.Parameter(torch.randn(width, width, dtype=DTYPE).t() / width)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Tied(Square): ...


class Unused(Part):
    """Has parameters that it doesn't use."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.bias = nn.Parameter(torch.randn(width, dtype=DTYPE))
        self.never = linear(width, size)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Bytes(Part):
    """A parameter that can't be trained."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        values = torch.arange(width, dtype=torch.uint8)
        self.values = nn.Parameter(values, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(width, dtype=DTYPE))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias + self.values.to(x.dtype) / 8


class Float32(Part):
    """A parameter of another dtype than the rest."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.low = nn.Parameter(torch.rand(width))
        self.bias = nn.Parameter(torch.randn(width, dtype=DTYPE))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.low.to(x.dtype) + self.bias


class NoRows(Part):
    """A parameter without elements."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.rows = nn.Parameter(torch.zeros(0, width, dtype=DTYPE))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows.sum(0)


LEAVES: dict[str, type[Part]] = {
    "mlp": Mlp,
    "lone": Lone,
    "scale": Scale,
    "square": Square,
    "tied": Tied,
    "unused": Unused,
    "bytes": Bytes,
    "float32": Float32,
    "no rows": NoRows,
}


class Blocks(nn.Module):
    """What a ``Block`` describes."""

    def __init__(self, spec: Block, parts: list[nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.checkpoint == "within":
            return _checkpointed(self.run, x)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = run_parts(self.parts, x)
        return x + y if self.spec.residual else y


def run_parts(parts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for part in parts:
        how = part.spec.checkpoint if isinstance(part, Blocks) else None
        if how in ("around", "around, reentrant"):
            x = _checkpointed(part, x, reentrant=how != "around")
        else:
            y = part(x)
            x = LOST.pop() if y is None else held_in(y)
    return x


def _checkpointed(fn, x: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
    return checkpoint(fn, x, use_reentrant=reentrant, preserve_rng_state=False)


class Model(nn.Module):
    """What a ``RandomModel`` describes. Two outputs."""

    def __init__(self, spec: RandomModel) -> None:
        super().__init__()
        self.spec = spec
        leaves: list[Part] = []
        self.parts = nn.ModuleList(_made(part, spec.width, leaves) for part in spec.parts)
        self.a, self.b = linear(spec.width, 2), linear(spec.width, 2, bias=False)
        squares = [leaf for leaf in leaves if isinstance(leaf, Square)]
        for leaf in squares:
            if isinstance(leaf, Tied):
                leaf.weight = squares[0].weight

    @property
    def leaves(self) -> list[Part]:
        return [module for module in self.modules() if isinstance(module, Part)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = run_parts(self.parts, x)
        return self.a(x), self.b(x)

    def terms(self) -> list[torch.Tensor]:
        """Loss terms that the forward before has left."""
        terms = [held_in(leaf.aux) for leaf in self.leaves if leaf.aux is not None]
        terms += LOST_TERMS
        LOST_TERMS.clear()
        return terms


def _made(part: Leaf | Again | Block, width: int, leaves: list[Part]) -> nn.Module:
    if isinstance(part, Block):
        return Blocks(part, [_made(each, width, leaves) for each in part.parts])
    if isinstance(part, Again) and leaves:
        return leaves[part.leaf % len(leaves)]
    leaf = Leaf("mlp") if isinstance(part, Again) else part
    made = LEAVES[leaf.kind](width, leaf.size)
    made.spec = leaf
    leaves.append(made)
    return made


# ---- made parallel ----


def apply(model: Model, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Tensor parallelism, then units bottom-up."""
    ranks = mesh["tp"].size()
    plan = {}
    for name, module in model.named_modules():
        if isinstance(module, Mlp) and module.size >= ranks:
            plan |= {f"{name}.up": "colwise", f"{name}.down": "rowwise"}
    if plan and ranks > 1:
        tp.resolve_plan(model, plan, tp_size=ranks).apply(model, mesh)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    units = _Units(shard, mesh["shard"].size())
    units.apply_parts(model.parts, model.spec.parts)
    for head in (model.a, model.b):
        units.apply(head, model.spec.heads)
    units.apply(model, model.spec.root)


class _Units:
    def __init__(self, shard, ranks: int) -> None:
        self.shard, self.ranks = shard, ranks
        self.done: set[nn.Module] = set()

    def apply_parts(self, modules: nn.ModuleList, specs: tuple) -> None:
        for module, spec in zip(modules, specs, strict=True):
            if isinstance(spec, Block):
                self.apply_parts(module.parts, spec.parts)
                rest = list(dict.fromkeys(m for m in module.parts if m not in self.done))
                if spec.as_list and rest:
                    self.apply(rest, spec.unit or Unit())
            if not isinstance(spec, Again):
                for each in (module.up, module.down) if isinstance(module, Lone) else (module,):
                    self.apply(each, spec.unit)

    def apply(self, module: nn.Module | list[nn.Module], unit: Unit | None) -> None:
        modules = module if isinstance(module, list) else [module]
        if unit is None or any(m in self.done for m in modules):
            return
        self.done.update(modules)
        reshard = unit.reshard
        if type(reshard) is int and (self.ranks % reshard or self.ranks == reshard):
            reshard = True
        options = {}
        if unit.dim1:
            options["shard_placement_fn"] = _second_dim
        if unit.hybrid:
            options["shard_optimizer_over_replicate"] = True
        self.shard(module, reshard_after_forward=reshard, **options)


def _second_dim(param: nn.Parameter) -> Shard | None:
    """Not where tp cuts: an uneven cut of a cut is refused, and autograd can't ask simulated ranks
    whether a parameter of uneven sizes is dense."""
    return Shard(1) if param.ndim > 1 and not isinstance(param, DTensor) else None


# ---- strategies ----


def weighted(*choices: tuple[int, st.SearchStrategy]) -> st.SearchStrategy:
    """One of them, as often as its number says (``one_of`` drops repetitions)."""
    table = [strategy for weight, strategy in choices for _ in range(weight)]
    return st.integers(0, len(table) - 1).flatmap(table.__getitem__)


units = st.builds(Unit, st.sampled_from([None, True, False, 2]), st.booleans(), st.booleans())
maybe_units = st.none() | units
again = st.builds(Again, st.integers(0, 5))


def leaves(*odd: st.SearchStrategy) -> st.SearchStrategy[Leaf]:
    return st.builds(
        Leaf,
        st.sampled_from(["mlp", "mlp", *LEAVES]),
        st.integers(1, 5),
        weighted((3, st.none()), (1, units)),
        *odd,
    )


def blocks(parts: st.SearchStrategy, most: int) -> st.SearchStrategy[Block]:
    return st.builds(
        Block,
        st.lists(parts, min_size=1, max_size=most).map(tuple),
        maybe_units,
        st.sampled_from([False, False, True]),
        st.sampled_from([None, None, "within", "around", "around, reentrant"]),
        st.booleans(),
    )


def models_of(leaves: st.SearchStrategy[Leaf]) -> st.SearchStrategy[RandomModel]:
    inner = blocks(weighted((5, leaves), (1, again)), 2)
    outer = blocks(weighted((2, leaves), (3, inner), (1, again)), 2)
    parts = weighted((4, leaves), (3, inner), (2, outer), (1, again))
    return st.builds(
        RandomModel,
        st.lists(parts, min_size=1, max_size=3).map(tuple),
        st.integers(1, 5),
        units,
        maybe_units,
    )


models = models_of(leaves())
odd_models = models_of(
    leaves(
        st.sampled_from([None, *WRAPS, *WRAPS, "lost"]),
        st.sampled_from([None] * 6 + [*OUTPUTS, *OUTPUTS, "lost"]),
    )
)
