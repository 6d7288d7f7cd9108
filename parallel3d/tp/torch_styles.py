"""TorchStyle: one of torch's own ``ParallelStyle`` objects in a plan, beside ours.

Its module computes with DTensors, as under torch's ``parallelize_module``, whose hooks it gets. Its
parameters are made as for our styles, not by torch: so they stay tied and frozen, and nothing is communicated
for it.
"""

import functools
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
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.styles.base import (
    ParamRule,
    RandomLayout,
    Style,
    StyleTraffic,
    fit_rules,
    own_params,
)


@dataclass(frozen=True, repr=False)
class TorchStyle(Style):
    """A module made parallel by a ``torch.distributed.tensor.parallel.ParallelStyle``.

    Plans take such objects as they are; on an axis of one rank they do nothing. A linear layer whose split
    features ``tp`` doesn't divide raises: torch computes something else there, our styles don't.

    Attributes:
        style: torch's. One that splits parameters must be a ``ColwiseParallel``, ``RowwiseParallel`` or
            ``SequenceParallel``, or a subclass; one of another class must not change parameters.
    """

    style: ParallelStyle

    def __str__(self) -> str:
        cls = type(self.style)  # an object's default repr has its address, which differs by rank
        plain = cls.__repr__ is object.__repr__
        return f"torch's {f'{cls.__module__}.{cls.__qualname__}' if plain else repr(self.style)}"

    __repr__ = __str__

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        dims = self._split_dims(module)
        if dims is None:
            return {}
        if any(True for child in module.children() for _ in child.parameters()):
            raise PlanError(f"{type(module).__name__} has modules inside; give {self} to those")
        placements = {n: Shard(dims[n]) if n in dims else Replicate() for n in own_params(module)}
        rules = fit_rules(
            module, **{n: ParamRule(p, compute="dtensor") for n, p in placements.items()}
        )
        for name in (name for name in rules if name in dims and isinstance(module, nn.Linear)):
            size = own_params(module)[name].shape[dims[name]]
            if size % tp:
                ours = "colwise" if isinstance(self.style, ColwiseParallel) else "rowwise"
                raise PlanError(
                    f"dim {dims[name]} of {name} is {size}, which {tp} ranks can't share equally: torch's "
                    f"style can't compute that; our style {ours!r} can"
                )
        return rules

    def _split_dims(self, module: nn.Module) -> dict[str, int] | None:
        """Returns parameter's name -> dim that is split; None: the style doesn't change parameters."""
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

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        own = own_params(module)
        # torch's style makes new parameters, which would separate tied ones; it gets meta parameters instead.
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
        unchanged = self._split_dims(module) is None
        for name, p in own.items():
            got: Any = after.get(name)
            fits = getattr(got, "placements", None) == getattr(p, "placements", ())
            fits = got is stand_ins[name] if unchanged else fits
            if not fits or made is not module:
                raise PlanError(
                    f"{self} turned {name} of {type(module).__name__} into something that was not foreseen: "
                    f"{getattr(got, 'placements', got)}. A style that splits parameters must split them as "
                    "torch's ColwiseParallel, RowwiseParallel or SequenceParallel do"
                )
        if inside != {id(p) for child in module.children() for p in child.parameters()}:
            raise PlanError(f"{self} changed parameters of modules inside {type(module).__name__}")

    def _watch_sequence(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        """Registers hooks, run before torch's, that check the length of a split sequence."""
        if (dim := self._sequence_dim) is not None:
            set_length = functools.partial(_set_length, sequence, axis.size, dim)
            module.register_forward_hook(set_length)
        # It makes a DTensor of such a part, without the length of the whole.
        if self.takes_rows:
            check = functools.partial(_check_length, sequence, axis.size)
            module.register_forward_pre_hook(check)

    @property
    def takes_rows(self) -> bool:
        """Whether the style declares that its module's input is split over the batch or the sequence."""
        style = getattr(self.style, "prepare_module_input", self.style)
        if isinstance(style, SequenceParallel):
            return True
        named = getattr(style, "input_kwarg_layouts", None) or {}
        placements = (*(getattr(style, "input_layouts", None) or ()), *named.values())
        return any(isinstance(x, Shard) and x.dim in (0, 1) for x in placements)

    @property
    def _sequence_dim(self) -> int | None:
        """The sequence dim along which the style splits the module's output; None if it doesn't."""
        names = ("output_layouts", "desired_output_layouts")
        placements = [x for name in names for x in getattr(self.style, name, None) or ()]
        last = placements[-1] if placements else None
        return last.dim if isinstance(last, Shard) and last.dim in (0, 1) else None

    @property
    def splits_sequence(self) -> bool:
        return self._sequence_dim is not None

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        phases: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
        return tuple(StyleTraffic("torch's own", phase, None) for phase in phases)

    @property
    def random_after(self) -> RandomLayout:
        # torch handles the random numbers of DTensors.
        if not getattr(self.style, "use_local_output", False):
            return ""
        if isinstance(self.style, SequenceParallel) or self.splits_sequence:
            return "sequence"
        placement = (getattr(self.style, "output_layouts", None) or (None,))[-1]
        if isinstance(placement, Shard):
            return "features"
        return "whole" if isinstance(placement, Replicate) else ""


def _check_length(sequence: SequenceLength, ranks: int, *_: Any) -> None:
    """Raises StateError if a sequence has unequal parts, which torch's styles can't handle."""
    if sequence.length is not None and sequence.length % ranks:
        raise StateError(
            f"a sequence of {sequence.length} can't be shared equally by {ranks} tp ranks, and torch's "
            "styles take its parts for equal; our styles take any length"
        )


def _set_length(
    sequence: SequenceLength, ranks: int, dim: int, module: nn.Module, args: Any, output: Any
) -> None:
    """Forward hook, run before torch's, that records the length of the sequence which torch's style is about
    to split; our styles read it."""
    if isinstance(output, DTensor):
        sequence.length = output.shape[dim]
        _check_length(sequence, ranks)
