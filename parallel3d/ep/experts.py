"""Expert parallelism of a model: which modules hold experts, what becomes of them, their forward."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard

from parallel3d._layout.packing import pick_by_rank
from parallel3d._layout.param_layout import ParamLayout, local_chunk, set_param_layout
from parallel3d._torch.dtensor import make_dtensor, make_spec
from parallel3d._torch.simulated import call_by_rank, inner_tensors, ranks_are_simulated
from parallel3d._util import dry_run
from parallel3d._util.dry_run import note_obstacle
from parallel3d._util.forwards import as_if, unchanged_on_error, wrap_forward
from parallel3d._util.replaced_params import marking_replaced
from parallel3d.ep.division import Division, capacities, shard_dim
from parallel3d.ep.exchange import (
    Combine,
    Dispatch,
    Lengths,
    Routes,
    Untouched,
    destinations,
    exchange,
    routes,
)
from parallel3d.errors import PlanError, StateError
from parallel3d.mesh.joined import ExpertView, MeshAxis
from parallel3d.tp import ResolvedPlan, TpAxis, gather_from_tp, split_to_tp
from parallel3d.tp.lora import is_adapter
from parallel3d.tp.resolve import is_in, matches
from parallel3d.tp.styles.base import own_params

Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Experts:
    """Declares a module that holds experts, in a plan: ``tp_plan={"layers.*.moe.experts": ep.Experts()}``.

    Every parameter of the module has the experts as its first dim, and it is called with the hidden states
    (T, H), the experts of each token (T, K), integers, and their weights (T, K); it returns (T, H), the sum
    over each token's experts. transformers' modules of this kind are found without a rule.

    Attributes:
        call: ``call(module, hidden, index, weights)`` computes the same from this rank's experts, whose
            numbers begin with 0; by default the module's own forward.
        input: ``"replicate"``: the ranks of tp have the same tokens. ``"sequence"``: each has its part of
            them, by sequence parallelism; the output is this part's.
    """

    call: Call | None = None
    input: Literal["replicate", "sequence"] = "replicate"


@dataclass
class _State:
    """The data of the expert-parallel forward of a module.

    Attributes:
        inner: the forward that the module had, a function of the module and its arguments.
        names: the names of its three arguments.
        tp: the tp axis, whose ranks have the same tokens; None: there is no such axis.
        capacity: size of a message relative to uniform routing; None: the size that is needed.
        dropped: number of pairs that did not fit since ``ep.stats`` last read it; a tensor on the device.
    """

    axis: MeshAxis
    division: Division
    inner: Call
    names: tuple[str, ...]
    tp: TpAxis | None
    capacity: float | None = None
    dropped: Any = field(default=None, repr=False)


_ATTRIBUTE = "_parallel3d_ep"
_INDEX = re.compile("ind|expert|selected")  # in the name of the argument with each token's experts


def state_of(module: nn.Module) -> _State | None:
    """Returns the state of a module whose experts ``parallelize`` has divided over ep; None for others."""
    return vars(module).get(_ATTRIBUTE)


@note_obstacle
def _reads_sizes(model: nn.Module, batch: Any) -> str | None:
    for name, module in model.named_modules():
        state = state_of(module)
        if state is not None and state.capacity is None:
            return (
                f"the experts {name} read the sizes of their messages; p3d.ep.set_capacity(model, 1.25) "
                "fixes them"
            )
    return None


def experts_of(module: nn.Module) -> int:
    """Returns the number of experts in a module whose own parameters all have the experts as first dim; 0 if
    the module is not of that kind."""
    own = own_params(module).values()
    firsts = {param.shape[0] if param.dim() else 0 for param in own}
    stacked = any(param.dim() == 3 for param in own)
    inside = any(True for child in module.children() for _ in child.parameters())
    return firsts.pop() if stacked and len(firsts) == 1 and not inside else 0


def _arguments(module: nn.Module) -> list[str]:
    """Returns the names of the forward's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(module.forward).parameters.values()
    return [p.name for p in given if p.kind in kinds]


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns name -> module of the modules that hold stacked experts and are called with the arguments that
    :class:`Experts` describes."""
    holders = {name: m for name, m in model.named_modules() if experts_of(m) > 1}
    taken = {name: _arguments(module) for name, module in holders.items()}
    # Hidden states, the experts of each token, and their weights.
    routed = [name for name, words in taken.items() if len(words) == 3 and _INDEX.search(words[1])]
    return {name: holders[name] for name in routed}


@dataclass(frozen=True)
class EpPlan:
    """The modules of one model whose experts are divided over ep. ``modules``: name -> (module, its
    declaration); ``view``: the mesh with the axis ep."""

    view: ExpertView
    modules: Mapping[str, tuple[nn.Module, Experts]]

    def has(self, name: str) -> bool:
        """Whether ``name`` is one of these modules, or inside one."""
        return any(is_in(name, own) for own in self.modules)

    def without_experts(self, plan: ResolvedPlan) -> ResolvedPlan:
        """Returns a tensor-parallel plan without the modules that this plan divides over ep."""
        return replace(
            plan,
            modules=tuple(each for each in plan.modules if not self.has(each.name)),
            attributes=tuple(each for each in plan.attributes if not self.has(each.module)),
        )

    def apply(self, tp: DeviceMesh | None) -> None:
        """Divides the experts over ep, in place: each parameter becomes a DTensor on ep that holds this
        rank's experts, and the modules get a forward that exchanges tokens. ``tp``: the tp axis, whose ranks
        have the same tokens; None: there is none."""
        axis = MeshAxis(self.view.ep)
        tp_axis = None if tp is None or tp.size() == 1 else TpAxis(tp)
        for module, declared in self.modules.values():
            division = Division(experts_of(module), axis.size)
            new = {name: _divided(param, axis) for name, param in own_params(module).items()}
            with unchanged_on_error(module), marking_replaced(module):
                module._parameters.update(new)
                here = division.by_rank
                held = here[0] if len(set(here)) == 1 else pick_by_rank(here, axis.rank)
                for name, value in list(vars(module).items()):
                    is_int = type(value) is int and name.endswith("experts")
                    if is_int and value == division.experts:
                        setattr(module, name, held)
                names = tuple(_arguments(module)[:3])
                inner = wrap_forward(module, functools.partial(as_if, _forward), _forward)
                same = None if declared.input == "sequence" else tp_axis
                state = _State(axis, division, declared.call or inner, names, same)
                vars(module)[_ATTRIBUTE] = state

    def placement_of(self, param: nn.Parameter) -> Shard | None:
        """Returns how a parameter of experts is sharded over efsdp, the data axis of ``view``, see
        ``shard_dim``; None: the engine's default."""
        ranks, ep = self.view.data.size(self.view.data.ndim - 1), self.view.ep.size()
        dim = shard_dim(param.shape, ep, ranks)
        return None if dim is None else Shard(dim)


def _divided(param: nn.Parameter, axis: MeshAxis) -> nn.Parameter:
    """Returns the parameter as a DTensor on ep that holds this rank's experts."""
    local = local_chunk(param.detach(), 0, axis.size, axis.rank)
    spec = make_spec(axis.mesh, (Shard(0),), param.shape, param.dtype)
    new = nn.Parameter(make_dtensor(local, spec), requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)  # users' attributes
    set_param_layout(new, ParamLayout("local", "whole"))
    return new


def take_rules(plan: Any) -> tuple[Any, dict[str, Experts]]:
    """Splits a user's plan into the rules without ``Experts`` (None if none are left) and those with: pattern
    -> ``Experts``."""
    if not isinstance(plan, Mapping):
        return plan, {}
    declared = {name: style for name, style in plan.items() if isinstance(style, Experts)}
    rest = {name: style for name, style in plan.items() if name not in declared}
    return (rest or None) if declared else plan, declared


def plan_ep(
    model: nn.Module, view: ExpertView | None, declared: Mapping[str, Experts]
) -> EpPlan | None:
    """Returns the plan of expert parallelism for ``model``; None if the mesh has no ep. Changes nothing.
    PlanError: no module holds experts, one holds fewer than ep has ranks, or a rule names another module."""
    named = dict(model.named_modules())
    modules = {name: (module, Experts()) for name, module in find_experts(model).items()}
    for pattern, each in declared.items():
        matched = [name for name in named if matches(pattern, name)]
        if not matched:
            raise PlanError(
                f"ep: the rule {pattern!r} matches no module; there are {', '.join(list(named)[1:9])}, ..."
            )
        for name in matched:
            if not experts_of(named[name]) or len(_arguments(named[name])) < 3:
                raise PlanError(_why_not(name, named[name]))
            if each.input not in ("replicate", "sequence"):
                raise PlanError(f'{name}: input is {each.input!r}; use "replicate" or "sequence"')
            modules[name] = named[name], each
    if view is None:
        return None
    ep = view.ep.size()
    if not modules:
        kinds = [name for name, m in named.items() if "expert" in name.rpartition(".")[2].lower()]
        near = f": {_why_not(kinds[0], named[kinds[0]])}" if kinds else ""
        raise PlanError(
            f"the mesh has ep={ep}, but no module of {type(model).__name__} is known to hold experts{near}. "
            'Name it, tp_plan={"layers.*.moe.experts": parallel3d.ep.Experts()}, or use ep=1'
        )
    if "" in modules:
        raise PlanError(
            f"{type(model).__name__} itself holds the experts; give parallelize the module around it, whose "
            "other parameters lie on the mesh without ep"
        )
    for name, (module, _) in modules.items():
        around = [n for n in named if name.startswith(f"{n}.") and is_adapter(named[n])]
        if around:
            raise PlanError(
                f"{around[-1]} ({type(named[around[-1]]).__name__} of peft) has adapters of all experts for "
                f"the parameters of {name}, which ep can't divide. Adapt linear layers (target_modules), or "
                f'train the experts themselves (modules_to_save=["{around[0].rpartition(".")[2]}"])'
            )
        count = experts_of(module)
        if count < ep:
            fitting = [n for n in range(1, count + 1) if ep % n == 0]
            raise PlanError(
                f"{name} holds {count} experts, fewer than ep={ep} ranks: some would have none. Use ep="
                f"{fitting[-1]}"
            )
    users = [id(p) for m in model.modules() for p in own_params(m).values()]
    for name, (module, _) in modules.items():
        tied = [n for n, p in own_params(module).items() if users.count(id(p)) > 1]
        if tied:
            raise PlanError(f"{name}.{tied[0]} is shared with another module; ep can't divide it")
    for name, (module, declared_as) in modules.items():
        count = experts_of(module)
        whole = [n for n, b in module.named_buffers(recurse=False) if b.shape[:1] == (count,)]
        if whole and declared_as.call is None:
            raise PlanError(
                f"{name}.{whole[0]} is a buffer with an entry for each expert; ep divides parameters alone, "
                "and a forward of other experts would read the first entries. Make it a parameter with "
                "requires_grad=False, or pass Experts(call=...) with a function that reads the right ones"
            )
    return EpPlan(view, modules)


def _why_not(name: str, module: nn.Module) -> str:
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    shown = ", ".join(f"{n} {shape}" for n, shape in list(shapes.items())[:3]) or "no parameters"
    called = f"is called with ({', '.join(_arguments(module))})"
    has = called if experts_of(module) else f"has {shown}"
    return (
        f"{name} ({type(module).__name__}) {has}; ep divides parameters of the module's own, all with "
        "the experts as their first dim, one of them of three dims, in a module called with (hidden states, "
        "experts of each token, their weights). Stack experts that are modules in a list"
    )


# -- the forward -----------------------------------------------------------------------------------------


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: _State = vars(self)[_ATTRIBUTE]
    given = dict(zip(state.names, args, strict=False)) | kwargs
    if len(args) > 3 or set(given) != set(state.names):
        raise StateError(
            f"{type(self).__name__} on ep was called with {sorted(given)}; it takes {state.names}: hidden "
            "states (T, H), the experts of each token (T, K), and their weights (T, K)"
        )
    hidden, index, weights = (given[name] for name in state.names)
    _check(self, hidden, index, weights)
    tokens, tp = hidden.shape[0], state.tp
    if tp is None:
        return _on_ep(self, state, hidden, index, weights, tokens)
    part = _on_ep(
        self,
        state,
        split_to_tp(hidden, 0, tp),
        local_chunk(index, 0, tp.size, tp.rank),
        split_to_tp(weights, 0, tp),
        tp.chunk(tokens),
    )
    return gather_from_tp(part, 0, tokens, tp)


def _check(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
    shapes = tuple(hidden.shape), tuple(index.shape), tuple(weights.shape)
    two = hidden.dim() == index.dim() == 2 and index.shape == weights.shape
    if index.is_floating_point() or not two:
        raise StateError(
            f"{type(module).__name__} on ep got {shapes[0]}, {shapes[1]} of {index.dtype}, {shapes[2]}; it "
            "takes hidden states (T, H), the experts of each token (T, K), integers, and their weights (T, K)"
        )


def _on_ep(
    module: Any, state: _State, hidden: Tensor, index: Tensor, weights: Tensor, most: int
) -> Tensor:
    """Returns (T, H), for this rank's T tokens the weighted sum over each token's experts, on whatever ranks
    they are. ``most``: the largest T of all ranks."""
    axis = state.axis
    way, by_row, by_pair, taken = _ways(state, index, most)
    rows = hidden[way.token_of_row]
    weights = weights.flatten()[way.pair_of] * way.filled.to(weights.dtype)
    rows, weights = Dispatch.apply(rows, weights, by_row, by_pair, axis)
    meta = torch.stack([way.expert, way.row], 1)
    expert, row = exchange(meta, by_pair, axis, "pairs").long().unbind(1)
    row = row + call_by_rank(_first_rows, taken, expert)
    if sum(by_pair.taken) == 0 or _has_none(state):
        outputs: Tensor = Untouched.apply(rows, weights, *own_params(module).values())
    else:
        y = state.inner(module, rows[row], expert.unsqueeze(1), weights.unsqueeze(1))
        outputs = torch.zeros_like(rows, dtype=y.dtype).index_add(0, row, y)
    # A rank without tokens can't know the dtype of the others' outputs: all send that of the hidden states.
    back = Combine.apply(outputs.to(hidden.dtype), by_row, axis)
    return torch.zeros_like(hidden).index_add(0, way.token_of_row, back)


def _has_none(state: _State) -> bool:
    """Whether this rank holds no expert, as the last ranks may if ep doesn't divide their number."""
    last, rank = state.division.by_rank[-1], state.axis.rank
    if not last and isinstance(rank, torch.SymInt):
        raise StateError(
            f"{state.division.experts} experts on ep={state.axis.size} leave ranks without any, which "
            "can't be simulated in one process; compare on real processes"
        )
    return not last and not state.division.by_rank[rank]


def _ways(state: _State, index: Tensor, most: int) -> tuple[Routes, Lengths, Lengths, Tensor]:
    """Returns what this rank sends for ``index``, the experts of its tokens: the routes, the lengths of
    messages in rows and in pairs, and the numbers of rows and pairs that arrive from each rank, (ranks, 2),
    on the device. ``most``: the largest number of tokens of all ranks."""
    axis, division = state.axis, state.division
    if state.capacity is not None or dry_run.active():  # which has no routing: uniform
        factor = 1.0 if state.capacity is None else state.capacity
        room = capacities(most, index.shape[1], division, factor)
        if state.capacity is None:
            dry_run.reads("sizes of the experts' messages, which ep.set_capacity fixes")
        ways = _equal_ways(state, index, room)
        dropped = ways[0].dropped
        with torch.inference_mode(False), torch.no_grad():
            if state.dropped is None:
                state.dropped = dropped.clone()
            else:
                state.dropped.add_(dropped)  # in place: a replayed CUDA graph adds to it too
        return ways
    counts = call_by_rank(_counts, index, division)  # (ranks, 2): rows, pairs
    if ranks_are_simulated():  # these compute with tensors of one size only
        longest = torch.stack([each.max(0).values for each in inner_tensors(counts)]).max(0).values
        rows, pairs = longest.tolist()
        return _equal_ways(state, index, (rows, pairs))
    one = [1] * axis.size
    taken = exchange(counts, Lengths(one, one, equal=True), axis, "counts")
    # The layer's one host sync: sizes of the messages.
    sent, got = torch.stack([counts, taken]).tolist()
    by_row, by_pair = (Lengths([n[i] for n in sent], [n[i] for n in got]) for i in (0, 1))
    starts = (counts.cumsum(0) - counts).unbind(1)
    room = index.shape[0], index.numel()
    way = routes(index, division, (sum(by_row.sent), sum(by_pair.sent)), starts, room)
    return way, by_row, by_pair, taken


def _equal_ways(
    state: _State, index: Tensor, room: tuple[int, int]
) -> tuple[Routes, Lengths, Lengths, Tensor]:
    """Returns what ``_ways`` does, for messages of one size: ``room`` is (rows, pairs) of each."""
    size = state.axis.size
    ranks = torch.arange(size, device=index.device)
    sizes = room[0] * size, room[1] * size
    starts = [ranks * each for each in room]
    way = Routes(*call_by_rank(routes, index, state.division, sizes, starts, room))
    by_row, by_pair = (Lengths([each] * size, [each] * size, equal=True) for each in room)
    return way, by_row, by_pair, torch.stack([torch.full_like(ranks, each) for each in room], 1)


def _counts(index: Tensor, division: Division) -> Tensor:
    by_token, by_pair = destinations(index, division)
    return torch.stack([by_token.sum(1), by_pair.sum(1)], 1)


def _first_rows(taken: Tensor, expert: Tensor) -> Tensor:
    """Returns, for each received pair, the index among all received rows at which its message begins.
    ``taken``: (ranks, 2), rows and pairs from each rank; ``expert``: one entry for each pair."""
    rows, pairs = taken.unbind(1)
    return torch.repeat_interleave(rows.cumsum(0) - rows, pairs, output_size=expert.shape[0])
