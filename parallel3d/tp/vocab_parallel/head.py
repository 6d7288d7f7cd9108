"""Loss parallel: a model's output head keeps its logits split, or makes them only when they are needed."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d._torch.autograd import functorch_is_active, untraced
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, is_plain
from parallel3d.tp.collectives import SequenceLength, TpAxis, gather_from_tp
from parallel3d.tp.forwards import TpState, bind_base_forward, take_input
from parallel3d.tp.overlap import linear
from parallel3d.tp.plan import PlannedModule, ResolvedPlan
from parallel3d.tp.styles import Colwise, Style
from parallel3d.tp.styles.base import Traffic
from parallel3d.tp.vocab_parallel.vocab_logits import lazy_logits, sharded_logits


@dataclass(frozen=True)
class LogitsHead(Style):
    """A column-parallel output head whose logits are ``VocabLogits``: they have the plain logits' shape,
    cross entropy takes them split as they are, and everything else gets them gathered.

    Attributes:
        head: how the layer would be without loss parallel.
        chunked: in training, logits are made some tokens at a time, in the loss and in the backward.
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
        return *dataclasses.replace(self.head, output="shard").traffic(module, tp), *loss

    @property
    def takes_parts(self) -> bool:
        return self.head.takes_parts


def logits_head(self: Any, input: Tensor) -> Tensor:
    """(..., in) -> VocabLogits (..., out)."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    x = take_input(input, style.head.input, style.head.sequence_dim, tp, read_only=True)
    if torch.compiler.is_compiling() or functorch_is_active():  # neither can look into our subclass
        y = F.linear(x, self.weight, self.bias)
        return gather_from_tp(y, -1, self.out_features, tp.axis)
    return _logits(self, x, tp.axis, style.chunked)


def _chunked_linear(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a head that is whole on each rank."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or functorch_is_active() or not torch.is_grad_enabled():
            return inner(self, input)
        return _logits(self, input, None, True)

    return as_if(forward, inner)


@untraced
def _logits(head: Any, x: Tensor, axis: TpAxis | None, chunked: bool) -> Tensor:
    # Without a backward to come the head's weight may be freed when its forward ends.
    if chunked and torch.is_grad_enabled():
        return lazy_logits(x, head.weight, head.bias, head.out_features, axis)
    return sharded_logits(linear(x, head.weight, head.bias), head.out_features, axis)


def chunk_whole_head(model: nn.Module, plan: ResolvedPlan | None) -> None:
    """Where tp has one rank: the output head makes its logits when they are needed."""
    planned = plan.modules if plan is not None else ()
    names = [p.name for p in planned if isinstance(p.style, LogitsHead)]
    head = model.get_submodule(names[0] if names else find_head(model, None))
    wrap_forward(head, _chunked_linear, "chunked head")


def with_loss_parallel(plan: ResolvedPlan, model: nn.Module, *, chunked: bool) -> ResolvedPlan:
    """``plan`` with its output head under loss parallel.

    Raises:
        PlanError: the plan has no column-parallel head, or several that may be it.
    """
    name = find_head(model, plan)

    def changed(planned: PlannedModule) -> PlannedModule:
        if planned.name != name:
            return planned
        style = LogitsHead(planned.style, chunked)  # type: ignore[arg-type]
        traffic = style.traffic(model.get_submodule(name), plan.tp_size) if plan.tp_size > 1 else ()
        return dataclasses.replace(planned, style=style, traffic=traffic)

    return dataclasses.replace(plan, modules=tuple(map(changed, plan.modules)))


def find_head(model: nn.Module, plan: ResolvedPlan | None) -> str:
    """The path of the model's output head.

    It is what the model's ``get_output_embeddings()`` (Hugging Face) returns, else the linear layer that
    shares its weight with an embedding, else the one outside the repeated blocks that has as many outputs
    as an embedding has rows. With a plan it must be column-parallel there.

    Raises:
        PlanError: there is none, or several.
    """
    modules = dict(model.named_modules())
    heads = {n: m for n, m in modules.items() if isinstance(m, nn.Linear)}
    if plan is not None:
        planned = {p.name for p in plan.modules if _may_be_split(p)}
        heads = {n: m for n, m in heads.items() if n in planned}
    else:
        heads = {n: m for n, m in heads.items() if is_plain(m, nn.Linear)}
    said = _output_embeddings(model)
    found = (
        [n for n, m in heads.items() if m is said] if said is not None else _alike(modules, heads)
    )
    if len(found) == 1:
        return found[0]
    if found:
        raise PlanError(
            f"loss_parallel: {' and '.join(map(repr, found))} may each be the output head; give the model "
            "a method get_output_embeddings() that returns the one whose logits the loss is of"
        )
    what = "linear layer" if plan is None else "linear layer with the style 'colwise_gather_output'"
    named = next((n for n, m in modules.items() if m is said), None)
    shown = f"{named!r} is the model's output head, but no" if named else "no"
    raise PlanError(
        f"loss_parallel: {shown} {what} that puts out the vocabulary; there are "
        f"{', '.join(map(repr, heads)) or 'none with that style'}. Give the head that style, or leave "
        "loss_parallel out"
    )


def _may_be_split(planned: PlannedModule) -> bool:
    whole = all(p.rule.packing is None for p in planned.params)
    return isinstance(planned.style, Colwise) and whole


def _output_embeddings(model: nn.Module) -> object:
    method = getattr(model, "get_output_embeddings", None)
    if not callable(method):
        return None
    try:
        return method()
    except (AttributeError, NotImplementedError):
        return None  # so transformers' base class says that a model has no head


def _alike(modules: dict[str, nn.Module], heads: dict[str, nn.Linear]) -> list[str]:
    """The layers that share their weight with an embedding, or put out as much as one has rows."""
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    tied = [n for n, m in heads.items() if any(m.weight is t.weight for t in tables)]
    if tied:
        return tied
    sizes = {t.num_embeddings for t in tables}
    repeated = [f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList)]
    return [
        n
        for n, m in heads.items()
        if m.out_features in sizes and not any(n.startswith(r) for r in repeated)
    ]
