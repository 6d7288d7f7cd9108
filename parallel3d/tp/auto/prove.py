"""A comparison that proves a plan for one module: split over ranks, it computes the same as the plain module.

The module has random weights in float64. It runs forward and backward, once plain and once on ranks that are
threads of this process. Random numbers that it draws for dropout are replaced by their mean, so that the code
for training runs and its results can be compared.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from types import NoneType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from parallel3d._trace.copies import copy_with, left_by_forward, map_once, random_like
from parallel3d._trace.record import Operations
from parallel3d._util.forwards import set_class
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import PlanError
from parallel3d.tp.auto.heads import resolve
from parallel3d.tp.auto.trace import FirstCall
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.float8 import is_float8
from parallel3d.tp.local_attributes import PlannedAttribute
from parallel3d.tp.resolve import PlanSource
from parallel3d.tp.styles import Style
from parallel3d.tp.styles.base import ParamRule, is_plain, own_params

# Tensor-parallel ranks as threads of this process. They need no process group, so they work within a job
# that has one, on every rank alike, and run the same forwards, styles and collectives as a job does.

ResultT = TypeVar("ResultT")

# The work of a collective, which has finished.
_DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


class _Exchange:
    """Lets ``size`` threads exchange tensors: each passes one and gets the list of all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, what: str, tensor: Tensor) -> list[Tensor]:
        # A copy: the sender may write to its tensor while others still read it.
        self.slots[rank] = (what, tensor.detach().clone())
        self.barrier.wait()
        received = list(self.slots)
        self.barrier.wait()
        kinds = {(name, tuple(t.shape), t.dtype) for name, t in received}
        if len(kinds) > 1:
            raise RuntimeError(f"the ranks disagree about a collective: {sorted(map(str, kinds))}")
        return [t for _, t in received]


class _ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads; it has the collectives that ``tp`` uses."""

    def __init__(self, exchange: _Exchange, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._exchange, self._index, self._ranks = exchange, rank, size

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        (tensor,) = tensors
        largest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
        assert largest or opts is None or opts.reduceOp == dist.ReduceOp.SUM, opts.reduceOp
        parts = torch.stack(self._exchange.exchange(self._index, f"all-reduce {largest}", tensor))
        with torch.no_grad():
            tensor.copy_(parts.amax(0) if largest else parts.sum(0))
        return _DONE

    def all_gather_single(self, output: Tensor, input: Tensor, *_: Any) -> Any:
        with torch.no_grad():
            parts = self._exchange.exchange(self._index, "allgather", input)
            output.view(-1).copy_(torch.cat([t.reshape(-1) for t in parts]))
        return _DONE

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *_: Any) -> Any:
        with torch.no_grad():
            parts = self._exchange.exchange(self._index, "reducescatter", input)
            output.view(-1).copy_(torch.stack(parts).sum(0).view(self._ranks, -1)[self._index])
        return _DONE

    # torch 2.11's names.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


class ThreadAxis(TpAxis):
    """A ``TpAxis`` without a mesh whose ranks are threads of this process; each thread has its own."""

    def __init__(self, exchange: _Exchange, rank: int, size: int) -> None:
        self.mesh = None  # type: ignore[assignment]
        self.size, self.rank = size, rank
        self.copies, self.gathered = [], []
        self.group = _ThreadGroup(exchange, rank, size)


def run_ranks(size: int, run: Callable[[ThreadAxis], ResultT]) -> list[ResultT]:
    """Calls ``run(axis)`` in ``size`` threads at once, one per rank, and returns the results by rank; raises
    an error of the lowest rank that failed."""
    exchange = _Exchange(size)

    def work(rank: int) -> ResultT:
        try:
            return run(ThreadAxis(exchange, rank, size))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
    for future in futures:
        # Of a rank whose barrier broke another one has failed.
        if not isinstance(error := future.exception(), (NoneType, threading.BrokenBarrierError)):
            raise error
    return [future.result() for future in futures]


_TOLERANCE = 1e-8
_WHOLE = ParamRule(Replicate())
OF_WHOLE_INPUT = (
    " (its forward reshapes to sizes of its whole input, such as C // heads with C = x.size(-1): take them "
    "from the module, such as self.head_dim, or write -1)"
)


class NotEqual(Exception):
    """The split module computes something else than the plain one, or raises; the message says what."""


class NotProven(NotEqual):
    """The two can't be compared: the plain module doesn't run by itself, or its results say nothing."""


@dataclass(frozen=True)
class Proof:
    """The result of a comparison that found a tensor-parallel module to be equal to the plain one.

    Attributes:
        difference: the largest difference of an element, relative to the largest element of its tensor.
        partial: paths of parameters without a style whose gradient is a partial sum on each rank.
    """

    difference: float
    partial: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """How a module is split, after ``resolve``: styles by path, rules by path and parameter's name, and the
    attributes that differ by rank."""

    styles: dict[str, Style]
    rules: dict[str, dict[str, ParamRule]]
    attributes: tuple[PlannedAttribute, ...]


def resolve_split(module: nn.Module, styles: Mapping[str, Style], tp: int) -> Split:
    """Resolves ``styles`` (path in ``module`` -> style) for ``tp`` ranks; raises PlanError at a problem."""
    resolution = resolve(module, PlanSource(styles), tp, strict=True, tied=False)
    if resolution.problems:
        raise PlanError(resolution.problems[0])
    ruled = resolution.ruled_in_order()
    return Split(
        {one.name: one.style for one in ruled},
        {one.name: resolution.rules[id(one.module)] for one in ruled},
        tuple(resolution.attributes),
    )


@dataclass
class _Result:
    """What a run computed. ``values``: outputs, gradients of inputs and changed buffers, by a text that names
    them."""

    values: dict[str, Tensor | None]
    param_grads: dict[str, Tensor | None]


_NARROW = 16
"""Features with which a proof computes linear layers, of those that aren't split: they say nothing of the
code between the layers, and are most of a large model's weights."""


def _narrowed(layer: Any, is_up: bool) -> dict[int, tuple[int, ...]]:
    """Returns id -> smaller shape of a linear layer's parameters: only ``_NARROW`` of the features that
    aren't split are left, input features if ``is_up``, else output features. Empty for other or smaller
    layers."""
    if not is_plain(layer, nn.Linear) or layer.weight.shape[int(is_up)] <= _NARROW:
        return {}
    if is_up:
        return {id(layer.weight): (layer.weight.shape[0], _NARROW)}
    return {id(p): (_NARROW, *p.shape[1:]) for p in own_params(layer).values()}


def _take_whole(layer: Any, is_up: bool) -> None:
    """Adds a hook to a layer with narrowed parameters: it cuts the layer's input (``is_up``) or pads its
    output, to fit."""
    if is_up:
        cut = functools.partial(map_tensors, lambda x: x[..., :_NARROW])
        layer.register_forward_pre_hook(lambda _, *given: cut(given), with_kwargs=True)
    else:
        missing = (0, layer.out_features - _NARROW)
        layer.register_forward_hook(lambda _, args, y: F.pad(y, missing))


def cost(module: nn.Module, ends: Mapping[str, bool]) -> int:
    """Returns how many parameters a comparison of ``module`` holds; ``ends`` is as in ``Prover``."""
    narrow = _all_narrowed(module, ends)
    return sum(prod(narrow.get(id(p), p.shape)) for p in module.parameters())


def _all_narrowed(module: nn.Module, ends: Mapping[str, bool]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for path, is_up in ends.items():
        found |= _narrowed(module.get_submodule(path), is_up)
    return found


class Prover:
    """Compares ``module``, split over ``tp`` ranks in different ways, with the plain module, on the arguments
    of ``call``.

    Args:
        internal: layers whose outputs may differ by rank. Outputs of the module that depend on them are not
            compared, because nothing outside the module reads them.
        ends: path of a linear layer in the module -> whether its output features are split (True) or its
            input features (False).
        attributes: also compare tensors that require gradients and that the forward leaves in modules'
            attributes.
    """

    def __init__(
        self,
        module: nn.Module,
        call: FirstCall,
        tp: int,
        internal: frozenset[str] = frozenset(),
        *,
        ends: Mapping[str, bool] | None = None,
        attributes: bool = False,
    ) -> None:
        self._attributes = attributes
        shapes = _all_narrowed(module, ends or {})
        self._ends = {
            k: v for k, v in (ends or {}).items() if _narrowed(module.get_submodule(k), v)
        }
        self._call, self._original, self._tp = call, module, tp
        self._generator = torch.Generator().manual_seed(0)
        weights: dict[int, Tensor] = {}

        def random(param: nn.Parameter) -> nn.Parameter:
            shape = shapes.get(id(param), tuple(param.shape))
            weights[id(param)] = made = random_like(shape, self._generator)
            return nn.Parameter(made)  # frozen ones too, so that there is something to compare

        self._plain = self._copy(random)
        self._weights = {
            name: weights[id(p)] for name, p in module.named_parameters(remove_duplicate=False)
        }
        self._computed: set[int] = set()  # ids of the inputs that take gradients
        self._inputs = self._random_inputs()
        self._whole = [not (sources & internal) for sources in call.outputs]
        self._upstream: list[Tensor] = []
        self._results: dict[bool, _Result] = {}

    def _copy(self, make: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
        model = copy_with(self._original, make)
        for layer in model.modules():
            if is_float8(layer):  # computes in float32: only the code around it is to be proven
                set_class(layer, nn.Linear)
        for path, is_up in self._ends.items():
            _take_whole(model.get_submodule(path), is_up)
        return model

    def prove(self, styles: Mapping[str, Style]) -> Proof:
        """Runs the module split by ``styles`` (path in it -> style) and compares it with the plain one.
        Raises NotEqual if outputs or gradients differ or the split module raises, PlanError if a style
        doesn't fit."""
        return self.prove_split(resolve_split(self._original, styles, self._tp))

    def prove_split(self, split: Split) -> Proof:
        """Runs the module split as ``split`` says, and compares it with the plain one; raises NotEqual if it
        differs."""
        worst, partial = 0.0, set[str]()
        for training in (True, False):
            if training not in self._results:
                self._results[training] = self._run_plain(training)
            try:
                got = run_ranks(self._tp, functools.partial(self._run_split, split, training))
            except Exception as error:
                first = (str(error) or type(error).__name__).strip().splitlines()[0]
                if "is invalid for input of size" in first:
                    first += OF_WHOLE_INPUT
                raise NotEqual(
                    f"on {self._tp} ranks it raises {type(error).__name__}: {first}"
                ) from error
            worst = max(worst, self._compare(self._results[training], got, split.rules, partial))
        return Proof(worst, tuple(sorted(partial)))

    def _random_inputs(self) -> Any:
        """Returns the call's arguments in float64, random where they depended on weights or the input."""

        def fresh(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            if id(tensor) not in self._call.computed:
                return tensor.double()
            made = torch.randn(tensor.shape, dtype=torch.float64, generator=self._generator)
            self._computed.add(id(made))
            return made

        return map_once(fresh, (self._call.args, self._call.kwargs))

    def _run(self, model: nn.Module, training: bool) -> _Result:
        model.double().train(training)
        model.zero_grad()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            if id(tensor) in self._computed:
                leaves.append(copy.requires_grad_())
            return copy

        args, kwargs = map_once(leaf, self._inputs)
        with torch.enable_grad(), Operations(_deterministic):
            tensors = list(tensors_in(model(*args, **kwargs)))
            if len(tensors) != len(self._whole):
                raise RuntimeError("the number of tensors it puts out is not always the same")
            outputs = [t for t, whole in zip(tensors, self._whole, strict=True) if whole]
            left = {
                f"attribute {path}.{name}, {i}": tensor
                for path, owner, name in (left_by_forward(model) if self._attributes else ())
                for i, tensor in enumerate(tensors_in(vars(owner)[name]))
                if tensor.requires_grad
            }
            trained = [t for t in (*outputs, *left.values()) if t.requires_grad]
            if not trained:
                raise RuntimeError("nothing that it puts out depends on weights")
            self._upstream = self._upstream or [
                torch.randn(t.shape, dtype=torch.float64, generator=self._generator)
                for t in trained
            ]
            pairs = list(zip(self._upstream, trained, strict=True))
            if any(g.shape != t.shape for g, t in pairs):
                raise RuntimeError("what it puts out, or leaves in attributes, has another shape")
            torch.autograd.backward(trained, [g.to(t.dtype) for g, t in pairs])
        values: dict[str, Tensor | None] = {
            f"output {i}": t.detach() for i, t in enumerate(outputs)
        }
        values |= {name: tensor.detach() for name, tensor in left.items()}
        values |= {f"the gradient of input {i}": x.grad for i, x in enumerate(leaves)}
        values |= {f"buffer {n}": b for n, b in _take_buffers(model, before).items()}
        grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        return _Result(values, grads)

    def _run_split(self, split: Split, training: bool, axis: TpAxis) -> _Result:
        originals = dict(self._original.named_modules(remove_duplicate=False))
        by_param = {
            id(originals[module]._parameters[name]): rule
            for module, own in split.rules.items()
            for name, rule in own.items()
        }
        names = {id(p): n for n, p in self._original.named_parameters()}

        def part(param: nn.Parameter) -> nn.Parameter:
            whole, rule = self._weights[names[id(param)]], by_param.get(id(param), _WHOLE)
            return nn.Parameter(rule.part(whole, axis.size, axis.rank).detach())

        model = self._copy(part)
        modules = dict(model.named_modules(remove_duplicate=False))
        sequence = SequenceLength()
        for name, style in split.styles.items():
            style.install(modules[name], axis, sequence)
        for attribute in split.attributes:
            attribute.set(modules[attribute.module], axis.rank)
        return self._run(model, training)

    def _run_plain(self, training: bool) -> _Result:
        try:
            want = self._run(self._plain, training)
        except Exception as error:
            raise NotProven(f"it doesn't run by itself in float64: {error}") from error
        for tensor in (*want.values.values(), *want.param_grads.values()):
            if tensor is not None and tensor.is_floating_point() and not tensor.sum().isfinite():
                raise NotProven("with random weights it gives infinite or undefined numbers")
        return want

    def _compare(
        self,
        want: _Result,
        got: list[_Result],
        rules: Mapping[str, dict[str, ParamRule]],
        partial: set[str],
    ) -> float:
        """Returns the largest relative difference between ``want``, the plain run, and ``got``, one run per
        rank; raises NotEqual if one is too large. Adds to ``partial`` the parameters without a rule whose
        gradients must be summed over tp."""
        found = [
            _difference(what, result.values.get(what), value)
            for result in got
            for what, value in want.values.items()
        ]
        planned = {  # path in the module -> rule
            f"{module}.{name}".lstrip("."): rule
            for module, own in rules.items()
            for name, rule in own.items()
        }
        for name in planned:
            grad = want.param_grads[name]
            unused = grad is None or not _largest(grad) > 0
            if unused and name.endswith("weight") and self._weights[name].numel():
                text = f"nothing it puts out depends on {name}, so nothing is proven of it"
                raise NotProven(text)
        # The gradient of a key's bias, which softmax ignores, consists of rounding errors only.
        known = (grad for grad in want.param_grads.values() if grad is not None)
        rounding = 1e-13 * max(map(_largest, known), default=0.0)
        for name, grad in want.param_grads.items():
            what, grads = f"the gradient of {name}", [r.param_grads[name] for r in got]
            rule = planned.get(name)
            summed = rule is not None and rule.tp_grad == "partial"
            if rule is None and any(_differs(g, grad, rounding) for g in grads):
                summed = True
                partial.add(name)
            if summed:
                parts = [g for g in grads if g is not None]
                total = torch.stack(parts).sum(0) if parts else None
                found.append(_difference(what, total, grad, rounding))
                continue
            for rank, g in enumerate(grads):
                wanted = None if grad is None else (rule or _WHOLE).part(grad, len(got), rank)
                found.append(_difference(what, g, wanted, rounding))
        return max(found, default=0.0)


def _take_buffers(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the buffers that differ from ``before``, such as running means, and sets them back."""
    changed = {}
    for name, buffer in model.named_buffers():
        old = before.get(name)
        if old is not None and old.shape == buffer.shape and not torch.equal(old, buffer):
            changed[name] = buffer.detach().clone()
            with torch.no_grad():
                buffer.copy_(old)
    return changed


def _differs(got: Tensor | None, want: Tensor | None, rounding: float) -> bool:
    try:
        _difference("", got, want, rounding)
    except NotEqual:
        return True
    return False


def _difference(what: str, got: Tensor | None, want: Tensor | None, rounding: float = 0.0) -> float:
    """Returns the largest difference divided by the largest absolute value of ``want``; NotEqual if it is
    above the tolerance, unless the difference itself is at most ``rounding`` or 1e-14. A tensor that is None
    counts as zeros."""
    rounding = max(rounding, 1e-14)
    if want is None or got is None:
        there = got if want is None else want
        if there is not None and _largest(there) > 0:
            raise NotEqual(f"{what} is missing on one side")
        return 0.0
    if got.shape != want.shape:
        raise NotEqual(f"{what} has the shape {tuple(got.shape)} and not {tuple(want.shape)}")
    if want.numel() == 0:
        return 0.0
    difference = _largest(got.double() - want.double())
    relative = difference / max(_largest(want), 1e-30)
    if not relative <= _TOLERANCE and not difference <= rounding:
        raise NotEqual(f"{what} differs by {relative:.1e} of its largest number")
    return relative if difference > rounding else 0.0


def _largest(tensor: Tensor) -> float:
    """Returns the largest absolute value; nan if one is nan."""
    if not tensor.numel():
        return 0.0
    return torch.linalg.vector_norm(tensor.double(), ord=torch.inf).item()


def _deterministic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operation ``func``, with two changes: random masks are replaced by their mean, and an
    explicit lower dtype by float64."""
    name = func._schema.name
    if name in ("aten::bernoulli_", "aten::bernoulli"):
        in_place = name[-1] == "_"
        default = 0.5 if in_place else args[0]
        mean = args[1] if len(args) > 1 else kwargs.get("p", default)
        drawn = args[0] if in_place else args[0].clone()
        return drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)
    if name == "aten::native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if kwargs.get("dtype") in (torch.float32, torch.float16, torch.bfloat16):
        kwargs["dtype"] = torch.float64
    return func(*args, **kwargs)
