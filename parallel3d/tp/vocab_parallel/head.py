"""Loss parallel: an output head that keeps its logits split, or computes them only when they are needed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d._torch.autograd import functorch_is_active, untraced
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d.errors import PlanError
from parallel3d.tp.collectives import SequenceLength, TpAxis, gather_from_tp
from parallel3d.tp.forwards import TpState, bind_base_forward, take_input
from parallel3d.tp.overlap import linear
from parallel3d.tp.plan import ResolvedPlan
from parallel3d.tp.styles import Colwise, Style
from parallel3d.tp.styles.base import ParamRule, Traffic, is_plain
from parallel3d.tp.vocab_parallel.vocab_logits import lazy_logits, sharded_logits


@dataclass(frozen=True)
class LogitsHead(Style):
    """A column-parallel output head whose logits are ``VocabLogits``: they have the plain logits' shape,
    cross entropy takes them split, and all other functions get them gathered.

    Attributes:
        head: the layer's style without loss parallel.
        chunked: whether, in training, the loss and the backward compute logits in chunks of tokens.
    """

    head: Colwise
    chunked: bool = False

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        return self.head.plan(module, tp)

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_base_forward(module, nn.Linear, logits_head, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        # The loss reduces two numbers a token.
        loss = (Traffic("all-reduce", "forward", 1),) * 2
        return *replace(self.head, output="shard").traffic(module, tp), *loss

    @property
    def takes_parts(self) -> bool:
        return self.head.takes_parts


def logits_head(self: Any, input: Tensor) -> Tensor:
    """(..., in) -> VocabLogits (..., out)."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    x = take_input(input, style.head.input, style.head.sequence_dim, tp, read_only=True)
    if torch.compiler.is_compiling() or functorch_is_active():  # neither handles our subclass
        y = F.linear(x, self.weight, self.bias)
        return gather_from_tp(y, -1, self.out_features, tp.axis)
    return _logits(self, x, tp.axis, style.chunked)


def _chunked_linear(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the forward of a head that is whole on each rank."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or functorch_is_active() or not torch.is_grad_enabled():
            return inner(self, input)
        return _logits(self, input, None, True)

    return as_if(forward, inner)


@untraced
def _logits(head: Any, x: Tensor, axis: TpAxis | None, chunked: bool) -> Tensor:
    # Without a backward the head's weight may be freed when its forward ends.
    if chunked and torch.is_grad_enabled():
        return lazy_logits(x, head.weight, head.bias, head.out_features, axis)
    return sharded_logits(linear(x, head.weight, head.bias), head.out_features, axis)


def chunk_whole_head(model: nn.Module, plan: ResolvedPlan | None) -> None:
    """Makes the output head compute its logits when they are needed, where tp has one rank."""
    planned = plan.modules if plan is not None else ()
    names = [p.name for p in planned if isinstance(p.style, LogitsHead)]
    head = model.get_submodule(names[0] if names else find_head(model, None))
    wrap_forward(head, _chunked_linear, "chunked head")


def with_loss_parallel(plan: ResolvedPlan, model: nn.Module, *, chunked: bool) -> ResolvedPlan:
    """Returns ``plan`` with its output head, which :func:`find_head` finds, under loss parallel."""
    modules = {planned.name: planned for planned in plan.modules}
    name = find_head(model, plan)
    style = LogitsHead(modules[name].style, chunked)  # type: ignore[arg-type]
    traffic = style.traffic(model.get_submodule(name), plan.tp_size) if plan.tp_size > 1 else ()
    modules[name] = replace(modules[name], style=style, traffic=traffic)
    return replace(plan, modules=tuple(modules.values()))


def find_head(model: nn.Module, plan: ResolvedPlan | None) -> str:
    """Returns the path of the model's output head.

    It is the result of the model's ``get_output_embeddings()`` (Hugging Face), else the linear layer that
    shares its weight with an embedding, else the one outside the repeated blocks that has as many outputs
    as an embedding has rows. With a plan it must be column-parallel there.

    Raises:
        PlanError: there is none, or several.
    """
    modules = dict(model.named_modules())
    split = {n for n, m in modules.items() if is_plain(m, nn.Linear)}
    if plan is not None:
        colwise = (planned for planned in plan.modules if isinstance(planned.style, Colwise))
        split = {one.name for one in colwise if all(p.rule.packing is None for p in one.params)}
    heads = {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and n in split}
    method, own = getattr(model, "get_output_embeddings", None), None
    # transformers' base class raises for a model without a head.
    with suppress(AttributeError, NotImplementedError):
        own = method() if callable(method) else None
    if own is not None:
        candidates = [n for n, m in heads.items() if m is own]
    else:
        candidates = _heads_of_embeddings(modules, heads)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise PlanError(
            f"loss_parallel: {' and '.join(map(repr, candidates))} may each be the output head; give the "
            "model a method get_output_embeddings() that returns the one whose logits the loss is of"
        )
    what = "linear layer" if plan is None else "linear layer with the style 'colwise_gather_output'"
    named = next((n for n, m in modules.items() if m is own), None)
    shown = f"{named!r} is the model's output head, but no" if named else "no"
    raise PlanError(
        f"loss_parallel: {shown} {what} that puts out the vocabulary; there are "
        f"{', '.join(map(repr, heads)) or 'none with that style'}. Give the head that style, or leave "
        "loss_parallel out"
    )


def _heads_of_embeddings(modules: dict[str, nn.Module], heads: dict[str, nn.Linear]) -> list[str]:
    """Returns the layers that share their weight with an embedding, or else have its number of classes."""
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    tied = [n for n, m in heads.items() if any(m.weight is t.weight for t in tables)]
    if tied:
        return tied
    sizes = {t.num_embeddings for t in tables}
    repeated = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList))
    return [n for n, m in heads.items() if m.out_features in sizes and not n.startswith(repeated)]
