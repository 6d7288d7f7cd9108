"""TorchStyle: one of torch's own ``ParallelStyle`` objects in a plan, beside ours.

Its module computes with DTensors, as torch has it. Parameters are made as for our styles, so they stay tied
and stay frozen, and none is communicated; torch's style gives the module its hooks.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallel3d.errors import PlanError, StateError
from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.styles.base import Style, Traffic


@dataclass(frozen=True, repr=False)
class TorchStyle(Style):
    """A module made parallel by a ``torch.distributed.tensor.parallel.ParallelStyle``.

    Plans take such objects as they are; on an axis of one rank they do nothing. A linear layer whose split
    features ``tp`` doesn't divide is refused: torch computes something else there, our styles don't.

    Attributes:
        style: torch's. One that splits parameters is a ``ColwiseParallel``, ``RowwiseParallel`` or
            ``SequenceParallel``, or a subclass; one of another class must leave them alone.
    """

    style: ParallelStyle

    def __str__(self) -> str:
        return f"torch's {_describe(self.style)}"

    __repr__ = __str__

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        dims = self._split_dims(module)
        if dims is None:
            return {}
        if any(True for child in module.children() for _ in child.parameters()):
            raise PlanError(f"{type(module).__name__} has modules inside; give {self} to those")
        rules = {
            name: ParamRule(_placement(dims.get(name)), compute="dtensor")
            for name, p in module._parameters.items()
            if p is not None
        }
        rules = fit_rules(module, **rules)
        for name, rule in rules.items():
            if isinstance(rule.placement, Shard):
                self._check(module, name, rule.placement.dim, tp)
        return rules

    def _split_dims(self, module: nn.Module) -> dict[str, int | None] | None:
        """The dim each parameter is split along, by name; None: the style leaves parameters alone."""
        if isinstance(self.style, SequenceParallel):
            return {}
        if not isinstance(self.style, (ColwiseParallel, RowwiseParallel)):
            return None
        colwise = isinstance(self.style, ColwiseParallel)
        if isinstance(module, nn.Linear):
            return {"weight": 0, "bias": 0} if colwise else {"weight": 1}
        if isinstance(module, nn.Embedding):
            return {"weight": 1 if colwise else 0}
        raise PlanError(f"{self} is for nn.Linear and nn.Embedding, not {type(module).__name__}")

    def _check(self, module: nn.Module, name: str, dim: int, tp: int) -> None:
        param: Any = module._parameters[name]
        size = param.shape[dim]
        if size % tp and isinstance(module, nn.Linear):
            ours = "colwise" if isinstance(self.style, ColwiseParallel) else "rowwise"
            raise PlanError(
                f"dim {dim} of {name} is {size}, which {tp} ranks can't share equally: torch's style "
                f"can't compute that; our style {ours!r} can"
            )

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        # torch's style makes parameters anew, so that tied ones come apart; it gets stand-ins without data.
        for name, p in own.items():
            empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=p.requires_grad)
        stand_ins = dict(module._parameters)
        inside = {id(p) for child in module.children() for p in child.parameters()}
        source = self.style.src_data_rank
        self._watch_sequence(module, axis, sequence)
        try:
            made = parallelize_module(module, axis.mesh, self.style, src_data_rank=None)
            after = dict(module._parameters)
        finally:
            self.style.src_data_rank = source
            module._parameters.update(own)
        left_alone = self._split_dims(module) is None
        for name, p in own.items():
            got: Any = after.get(name)
            fits = (
                got is stand_ins[name]
                if left_alone
                else getattr(got, "placements", None) == p.placements  # type: ignore[attr-defined]
            )
            if not fits or made is not module:
                raise PlanError(
                    f"{self} made of {name} of {type(module).__name__} what could not be foreseen: "
                    f"{getattr(got, 'placements', got)}. A style that splits parameters must split them as "
                    "torch's ColwiseParallel, RowwiseParallel or SequenceParallel do"
                )
        if inside != {id(p) for child in module.children() for p in child.parameters()}:
            raise PlanError(f"{self} changed parameters of modules inside {type(module).__name__}")

    def _watch_sequence(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        """Hooks that run before torch's: they see what it will split, and what it takes for parts."""
        out = _sequence_dim(self.style, "output_layouts", "desired_output_layouts")
        if out is not None:
            module.register_forward_hook(_Splits(sequence, axis.size, out))
        if self._takes_sequence():
            module.register_forward_pre_hook(_Takes(sequence, axis.size))

    def _takes_sequence(self) -> bool:
        """Whether it makes a DTensor of a part of a sequence, of which it doesn't know the length."""
        if isinstance(self.style, SequenceParallel):
            return True
        placements = getattr(self.style, "input_layouts", None) or ()
        return any(isinstance(x, Shard) and x.dim in (0, 1) for x in placements)

    @property
    def splits_sequence(self) -> bool:
        return _sequence_dim(self.style, "output_layouts", "desired_output_layouts") is not None

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        return Traffic("torch's own", "forward", None), Traffic("torch's own", "backward", None)

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        # Of a DTensor it is torch that sees to random numbers.
        if not getattr(self.style, "use_local_output", False):
            return ""
        if isinstance(self.style, SequenceParallel):
            return "sequence"
        if self.splits_sequence:
            return "sequence"
        placement = (getattr(self.style, "output_layouts", None) or (None,))[-1]
        if isinstance(placement, Shard):
            return "features"
        return "whole" if isinstance(placement, Replicate) else ""


@dataclass
class _Splits:
    """Notes the length of the sequence that torch's style is about to split, for our styles, too."""

    sequence: SequenceLength
    ranks: int
    dim: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, DTensor):
            self.sequence.length = output.shape[self.dim]
            _check_length(self.sequence, self.ranks)


@dataclass
class _Takes:
    sequence: SequenceLength
    ranks: int

    def __call__(self, module: nn.Module, args: Any) -> None:
        _check_length(self.sequence, self.ranks)


def _check_length(sequence: SequenceLength, ranks: int) -> None:
    if sequence.length is not None and sequence.length % ranks:
        raise StateError(
            f"a sequence of {sequence.length} can't be shared equally by {ranks} tp ranks, and torch's "
            "styles take its parts for equal; our styles take any length"
        )


def _sequence_dim(style: ParallelStyle, *names: str) -> int | None:
    """The dim of the sequence in the last of the layouts that the style has; None: it isn't split there."""
    layouts = [getattr(style, name, None) for name in names]
    placements = [x for found in layouts if found for x in found]
    last = placements[-1] if placements else None
    return last.dim if isinstance(last, Shard) and last.dim in (0, 1) else None


def _placement(dim: int | None) -> Shard | Replicate:
    return Replicate() if dim is None else Shard(dim)


def _describe(style: ParallelStyle) -> str:
    """What the style says of itself, where that is the same on every rank."""
    if type(style).__repr__ is object.__repr__:
        return f"{type(style).__module__}.{type(style).__qualname__}"
    return repr(style)
