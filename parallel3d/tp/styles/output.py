"""PrepareOutput, RopeOutput: what a module puts out, given to what reads it as it needs it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from parallel3d.errors import PlanError, StateError
from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.collectives import (
    TpAxis,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    scatter_sequence,
    split_to_tp,
)
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward, finish_sum
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.experts import Experts
from parallel3d.tp.styles.traffic import Traffic, summed

__all__ = ["PrepareOutput", "RopeOutput", "give_output"]


@dataclass(frozen=True)
class PrepareOutput(Style):
    """A module's output, the first tensor of it, given on in another layout.

    Its own parameters stay whole, and its forward the plain one.

    Attributes:
        given: what the module puts out: ``"partial"``: parts to be summed. ``"replicate"``: whole.
            ``"sequence"``: a part along ``sequence_dim``. ``"shard"``: a part of the features, the last dim.
        wanted: what is made of it: ``"replicate"``, ``"sequence"`` or ``"shard"``.
        features: size of the last dim of the whole, when ``given="shard"``.
        sequence_dim: of the output.
    """

    choices: ClassVar = {
        "given": ("partial", "replicate", "sequence", "shard"),
        "wanted": ("replicate", "sequence", "shard"),
    }

    given: Literal["partial", "replicate", "sequence", "shard"] = "partial"
    wanted: Literal["replicate", "sequence", "shard"] = "replicate"
    features: int = 0
    sequence_dim: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.given, self.wanted) not in _TRAFFIC:
            raise PlanError(
                f"PrepareOutput(given={self.given!r}, wanted={self.wanted!r}) is not among "
                f"{', '.join(f'{a} -> {b}' for a, b in _TRAFFIC)}"
            )
        if (self.given == "shard") != (self.features > 0):
            raise PlanError(
                f"PrepareOutput(given={self.given!r}, features={self.features}): features is the size of the "
                'whole last dim, for given="shard" only'
            )

    def with_params(self, params: dict[str, Style]) -> Style:
        if self == PrepareOutput():  # parameters split by rules of their own, and the output summed
            return Experts(tuple(params.items()))
        return super().with_params(params)

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = [name for name, p in module._parameters.items() if p is not None]
        if own and self.given != "replicate":
            raise PlanError(
                f"{type(module).__name__} has the parameters {', '.join(own)}, used on parts; give them "
                "rules or its modules styles"
            )
        return fit_rules(module, **{name: ParamRule(Replicate()) for name in own})

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, prepare_output, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        return _TRAFFIC[self.given, self.wanted]

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return _RANDOM[self.wanted]

    @property
    def splits_sequence(self) -> bool:
        return self.wanted == "sequence"

    @property
    def takes_parts(self) -> bool:
        return self.given == "sequence"


_RANDOM: dict[str, Literal["features", "sequence", "whole"]] = {
    "replicate": "whole",
    "sequence": "sequence",
    "shard": "features",
}
_TRAFFIC: dict[tuple[str, str], tuple[Traffic, ...]] = {
    ("partial", "replicate"): summed("replicate", None),
    ("partial", "sequence"): summed("sequence", None),
    ("replicate", "sequence"): (Traffic("all-gather", "backward", None),),
    ("replicate", "shard"): (Traffic("all-gather", "backward", None),),
    ("sequence", "replicate"): (Traffic("all-gather", "forward", None),),
    ("shard", "replicate"): (Traffic("all-gather", "forward", None),),
}


@dataclass(frozen=True)
class RopeOutput(Style):
    """A whole linear layer (or any module) the last features of whose output go to this rank's heads as they
    are, not through a column-parallel layer: they are given as a copy, whose gradient is summed.

    The compressed keys and values of multi-head latent attention: ``[kv_lora_rank | qk_rope_head_dim]``.

    Attributes:
        features: how many, 0: the ``qk_rope_head_dim`` of the module around it, or of the model's config.
    """

    features: int = 0

    def in_model(self, model: nn.Module, name: str) -> Style:
        if self.features:
            return self
        around = model.get_submodule(name.rpartition(".")[0])
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        for place in (around, getattr(around, "config", None), text, config):
            size = getattr(place, "qk_rope_head_dim", None)
            if isinstance(size, int) and size > 0:
                return replace(self, features=size)
        return self

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if not self.features:
            raise PlanError(
                "neither the module around it nor the model's config has a qk_rope_head_dim; give "
                "RopeOutput(features=...)"
            )
        own = [name for name, p in module._parameters.items() if p is not None]
        return fit_rules(module, **{name: ParamRule(Replicate()) for name in own})

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, rope_output, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        return (Traffic("all-reduce", "backward", self.features),)


def prepare_output(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's output, or the first tensor of several, in the layout that is wanted."""
    tp: TpState = self._parallel3d_tp
    return give_output(tp.inner(self, *args, **kwargs), tp.style, tp)


def give_output(y: Any, style: Any, tp: TpState) -> Any:
    """``y``, or the first tensor in it, in the layout that ``style`` wants."""
    if isinstance(y, Tensor):
        return _give(y, style, tp)
    if type(y) in (tuple, list) and any(isinstance(part, Tensor) for part in y):
        at = next(i for i, part in enumerate(y) if isinstance(part, Tensor))
        return type(y)([*y[:at], _give(y[at], style, tp), *y[at + 1 :]])
    raise StateError(f"{tp.style} got a {type(y).__name__}: no tensor, nor a tuple with one")


def _give(y: Tensor, style: Any, tp: TpState) -> Tensor:
    dim = style.sequence_dim
    if style.given == "partial" and style.wanted == "replicate":
        return reduce_from_tp(y, tp.axis)  # not in place: the module may still hold it
    if style.given == "partial":
        return finish_sum(y, "sequence", dim, tp)
    if style.given == "sequence":
        return gather_from_tp(y, dim, tp.sequence.of(y, dim, tp.axis), tp.axis)
    if style.given == "shard":
        return gather_from_tp(y, -1, style.features, tp.axis)
    if style.wanted == "shard":
        return split_to_tp(y, -1, tp.axis)
    tp.sequence.length = y.shape[dim]
    return scatter_sequence(y, dim, tp.axis)


def rope_output(self: Any, *args: Any, **kwargs: Any) -> Any:
    """(..., features): the last of them as a copy."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    y = tp.inner(self, *args, **kwargs)
    whole, rope = y[..., : -style.features], y[..., -style.features :]
    return torch.cat([whole, copy_to_tp(rope, tp.axis)], -1)
