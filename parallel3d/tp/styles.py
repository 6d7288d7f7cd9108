"""The styles: how one module is tensor-parallel.

A style is a frozen value that names no module and no mesh. :meth:`Style.plan` is pure: it says
which parameter of a module gets which placement on the ``tp`` axis, or why that can't be.
:meth:`Style.install` mutates: it gives the module instance a forward on local tensors. Parameters
are replaced by :meth:`~parallel3d.tp.ResolvedPlan.apply`, which knows about sharing.
"""

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from parallel3d.errors import PlanError
from parallel3d.tp import forwards
from parallel3d.tp.checks import (
    ParamRule,
    check_size,
    fit_rules,
    is_plain,
    need_per_token,
    need_plain,
    refuse_lookup_options,
)
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward

__all__ = [
    "Colwise",
    "PrepareInput",
    "Replicated",
    "Rowwise",
    "SequenceParallel",
    "Style",
    "VocabParallel",
]


@dataclass(frozen=True)
class Style(ABC):
    """Base of the styles. ``str()`` shows the fields that differ from their defaults."""

    choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, 1, 0.0)[0]
                raise PlanError(
                    f"{type(self).__name__}({name}={value!r}): {name} is one of "
                    f"{', '.join(map(repr, allowed))}. Did you mean {near!r}?"
                )

    def __str__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def for_module(self, module: nn.Module) -> "Style":
        """The style this one means on ``module``: itself, but for names used for two things."""
        return self

    @abstractmethod
    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        """The rule of each of the module's own parameters, by name.

        Raises:
            PlanError: a module type or a size this style can't do on ``tp`` ranks.
        """

    def install(  # noqa: B027 (optional)
        self, module: nn.Module, axis: TpAxis, sequence: SequenceLength
    ) -> None:
        """Gives ``module`` its tensor-parallel forward. Base: the forward it has is right."""

    def communicates(self) -> tuple[str, str]:
        """What it communicates in forward and in backward, for the report."""
        return "-", "-"

    @property
    def splits_sequence(self) -> bool:
        """Whether its forward splits the sequence among the ranks."""
        return False

    @property
    def takes_parts(self) -> bool:
        """Whether it must know the global length of the sequence it gets a part of."""
        return False


@dataclass(frozen=True)
class Colwise(Style):
    """Output features split over ``tp``: ``nn.Linear`` (weight and bias rows) and ``nn.Embedding``
    (the width: each rank has all tokens, part of each vector).

    Attributes:
        input: ``"replicate"``: whole. ``"sequence"``: a part along ``sequence_dim``, gathered.
            ``"gathered"``: an enclosing :class:`PrepareInput` has prepared it.
        output: ``"shard"``: (..., out / tp). ``"replicate"``: gathered, (..., out).
        multiple_of: never cut inside groups of so many features: the size of a head, so that every
            rank holds whole heads, equally many.
        sequence_dim: of the input, when ``input="sequence"``.
    """

    choices: ClassVar = {
        "input": ("replicate", "sequence", "gathered"),
        "output": ("shard", "replicate"),
    }

    input: Literal["replicate", "sequence", "gathered"] = "replicate"
    output: Literal["shard", "replicate"] = "shard"
    multiple_of: int = 1
    sequence_dim: int = 1

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if is_plain(module, nn.Embedding):
            if self.input != "replicate":
                raise PlanError(f"an nn.Embedding takes token ids: no input={self.input!r} for it")
            refuse_lookup_options(module, scale_grad_by_freq=True)
            check_size(module, "embedding_dim", self.multiple_of, tp)
            return fit_rules(module, weight=ParamRule(Shard(1)))
        need_plain(self, module, nn.Linear, nn.Embedding)
        check_size(module, "out_features", self.multiple_of, tp)
        return fit_rules(module, weight=ParamRule(Shard(0)), bias=ParamRule(Shard(0)))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        embedding = isinstance(module, nn.Embedding)
        forward = forwards.colwise_embedding if embedding else forwards.colwise_linear
        bind_forward(module, forward, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        into = {
            "replicate": ("", "all-reduce"),
            "sequence": ("all-gather", "reduce-scatter"),
            "gathered": ("", ""),
        }[self.input]
        out = ("all-gather", "") if self.output == "replicate" else ("", "")
        return _join(into[0], out[0]), _join(out[1], into[1])

    @property
    def takes_parts(self) -> bool:
        return self.input == "sequence"


@dataclass(frozen=True)
class Rowwise(Style):
    """Input features of an ``nn.Linear`` split over ``tp``; the bias is whole and added once, after
    the sum. On an ``nn.Embedding`` it means :class:`VocabParallel`, as in torch.

    Attributes:
        input: ``"shard"``: (..., in / tp), what :class:`Colwise` puts out. ``"replicate"``: whole,
            split here.
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        multiple_of: as in :class:`Colwise`, of the input features.
        sequence_dim: of the output, when ``output="sequence"``.
    """

    choices: ClassVar = {"input": ("shard", "replicate"), "output": ("replicate", "sequence")}

    input: Literal["shard", "replicate"] = "shard"
    output: Literal["replicate", "sequence"] = "replicate"
    multiple_of: int = 1
    sequence_dim: int = 1

    def for_module(self, module: nn.Module) -> Style:
        if isinstance(module, nn.Embedding):
            return VocabParallel(output=self.output, sequence_dim=self.sequence_dim)
        return self

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_plain(self, module, nn.Linear)
        check_size(module, "in_features", self.multiple_of, tp)
        # Added to a part of the sequence, the bias gets a part of its gradient.
        bias_grad: Literal["whole", "partial"] = "partial" if self.splits_sequence else "whole"
        return fit_rules(module, weight=ParamRule(Shard(1)), bias=ParamRule(Replicate(), bias_grad))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, forwards.rowwise_linear, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        out = _summed(self.output)
        return out[0], _join(out[1], "all-gather" if self.input == "replicate" else "")

    @property
    def splits_sequence(self) -> bool:
        return self.output == "sequence"


@dataclass(frozen=True)
class VocabParallel(Style):
    """The vocabulary of an ``nn.Embedding`` split over ``tp``: each rank looks up the tokens it
    holds. ``padding_idx`` is respected; ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` are
    refused.

    Attributes:
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        sequence_dim: of the output, when ``output="sequence"``.
    """

    choices: ClassVar = {"output": ("replicate", "sequence")}

    output: Literal["replicate", "sequence"] = "replicate"
    sequence_dim: int = 1

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_plain(self, module, nn.Embedding)
        refuse_lookup_options(module, scale_grad_by_freq=False)
        check_size(module, "num_embeddings", 1, tp)
        return fit_rules(module, weight=ParamRule(Shard(0)))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, forwards.vocab_parallel_embedding, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        return _summed(self.output)

    @property
    def splits_sequence(self) -> bool:
        return self.output == "sequence"


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A norm or dropout on this rank's part of the sequence; its parameters stay whole.

    For ``nn.LayerNorm`` and ``nn.RMSNorm`` over the last dim, ``nn.Dropout``, and any module of
    yours without children whose parameters are 1-D and elementwise on the last dim.

    Attributes:
        sequence_dim: of input and output.
        input: ``"sequence"``: a part. ``"replicate"``: whole, split here.
        output: ``"sequence"``: a part. ``"replicate"``: gathered, for what follows the last layer.
    """

    choices: ClassVar = {"input": ("sequence", "replicate"), "output": ("sequence", "replicate")}

    sequence_dim: int = 1
    input: Literal["sequence", "replicate"] = "sequence"
    output: Literal["sequence", "replicate"] = "sequence"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_per_token(module)
        own = [name for name, p in module._parameters.items() if p is not None]
        return fit_rules(module, **{name: ParamRule(Replicate(), "partial") for name in own})

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if "replicate" in (self.input, self.output):  # otherwise the plain forward is right
            bind_forward(module, forwards.sequence_parallel, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        return (
            "all-gather" if self.output == "replicate" else "-",
            "all-gather" if self.input == "replicate" else "-",
        )

    @property
    def splits_sequence(self) -> bool:
        return self.input == "replicate"

    @property
    def takes_parts(self) -> bool:
        # Without a gather it need not know the length, but without a split there are no parts.
        return self.input == "sequence"


@dataclass(frozen=True)
class Replicated(Style):
    """The module's own parameters stay whole on every rank and its forward is the plain one.

    Attributes:
        tp_grad: ``"whole"``: the ranks compute the same. ``"partial"``: each computes on other data
            (a norm on this rank's heads), so gradients are summed over ``tp``.
    """

    choices: ClassVar = {"tp_grad": ("whole", "partial")}

    tp_grad: Literal["whole", "partial"] = "whole"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = [name for name, p in module._parameters.items() if p is not None]
        if not own:
            raise PlanError(
                f"{type(module).__name__} has no parameters of its own to keep replicated; name "
                "the modules inside it"
            )
        return fit_rules(module, **{name: ParamRule(Replicate(), self.tp_grad) for name in own})


@dataclass(frozen=True)
class PrepareInput(Style):
    """Prepares a module's input once for all children that read it (q, k and v; gate and up), which
    then use ``Colwise(input="gathered")``: one collective instead of one each.

    The first positional tensor, or the first argument when given by name, is prepared; so are the
    named keyword arguments. Everything else passes through. All that the module computes from the
    input must go through children that are split: what is computed alike on every rank would get
    ``tp`` times its gradient.

    Attributes:
        layout: of the input: ``"replicate"``: whole. ``"sequence"``: a part, gathered.
        keywords: more arguments to prepare when they are given by name.
        sequence_dim: of the input, when ``layout="sequence"``.
    """

    choices: ClassVar = {"layout": ("replicate", "sequence")}

    layout: Literal["replicate", "sequence"] = "replicate"
    keywords: tuple[str, ...] = ()
    sequence_dim: int = 1

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, forwards.prepare_input, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        return (
            ("-", "all-reduce") if self.layout == "replicate" else ("all-gather", "reduce-scatter")
        )

    @property
    def takes_parts(self) -> bool:
        return self.layout == "sequence"


def _summed(output: str) -> tuple[str, str]:
    return ("all-reduce", "-") if output == "replicate" else ("reduce-scatter", "all-gather")


def _join(*operations: str) -> str:
    return ", ".join(op for op in operations if op not in ("", "-")) or "-"
