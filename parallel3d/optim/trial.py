"""Trials for ``optim.local``: what the user asserts about an optimizer class is tried on small parameters.

A trial proves nothing, since a class may treat other numbers or later steps differently; it refuses what it
catches. It takes twelve steps, twice, each from new weights: first with gradients that are random, orthogonal
to the weights, large, small and partly zero, which show projections, clipping, trust ratios and warm-ups;
then with gradients of one direction, which show estimates of the step size.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from parallel3d._torch.simulated import simulation_off
from parallel3d._util import dry_run
from parallel3d.errors import Parallel3dError
from parallel3d.optim.matrix import MatrixSteps, can_be_shared, of_no_parameter
from parallel3d.optim.pieces import State

ELEMENTWISE = {
    "ASGD": "the step's size and the average's weight are functions of lr and the count of steps",
    "Adadelta": "two averages of squares, number by number, and their quotient",
    "Adagrad": "a sum of squares, number by number; the rate is a function of the count of steps",
    "Adam": "two averages, number by number; their corrections are functions of the count of steps",
    "AdamW": "as Adam; the decay multiplies each weight by itself",
    "Adamax": "an average and a decaying maximum, both over time, number by number",
    "NAdam": "as Adam; the product of momenta is a function of the count of steps",
    "RAdam": "as Adam; whether and how it rectifies is a function of the count of steps",
    "RMSprop": "an average of squares, of gradients (centered) and a momentum, number by number",
    "Rprop": "each number's own step size, by the signs of its last two gradients",
    "SGD": "a momentum, number by number",
}
"""Name in ``torch.optim`` -> why its step on an element depends on no other element.

Not among them: Muon (orthogonal matrices), Adafactor (rows' and columns' means), LBFGS
(inner products) and SparseAdam.
"""


def is_known_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is one of ``ELEMENTWISE``; a subclass is not, as its step may do anything."""
    return any(optimizer_class is getattr(torch.optim, name, None) for name in ELEMENTWISE)


def step_of(optimizer_class: Any) -> Callable[..., Any]:
    """Returns the class's ``step`` without the hooks that torch wraps around it."""
    step = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_SHAPES = ((4, 6), (6,), (4, 6), (5, 3), (2, 3, 2, 2))
_MATRICES = ((4, 6), (5, 3), (4, 6))
_SQUARES = ((5, 5),) * 4  # for classes that take their parameters in pairs
_LARGE = (64, 128)  # from 4096 elements on classes quantize their states
_VARIED = (
    ("random", 1.0),
    ("orthogonal", 1.0),
    ("random", 1e-3),
    ("random", 1e3),
    ("sparse", 1.0),
    ("orthogonal", 1e-1),
    ("random", 1e-8),
    ("orthogonal", 1e4),
    ("random", 1e-1),
    ("along", 1.0),
    ("random", 1e1),
    ("orthogonal", 1e2),
)
_STEADY = (("steady", 1.0),) * 12
"""The gradients' kinds and sizes, step by step."""

Tensors = list[torch.Tensor]
Step = tuple[Tensors, Tensors]  # weights before it, gradients
Options = dict[str, Any]
Make = Callable[[], Any]  # of an optimizer


class _Differs(Exception):
    """What came out differently in a trial, as a clause for the message."""


def check_elementwise(
    optimizer_class: type[Optimizer], options: Options, group: Options, device: torch.device
) -> None:
    """Checks that steps on whole parameters and on two ranks' flat shards give the same weights and states.

    Args:
        options: the arguments of the class.
        group: the first parameter group's own options, which the class may ask for.
        device: the device it will step on, which some options depend on.
    """
    name = optimizer_class.__name__
    with _isolated():
        runs = [_steps(kinds, _SHAPES, torch.float64, device) for kinds in (_VARIED, _STEADY)]
        weights = runs[0][0][0]
        make = partial(_make, optimizer_class, options, group, weights)
        # What the class raises for the options is for the user to see; what it raises for our shapes is not.
        _make(optimizer_class, options, group, weights[:1])
        try:
            for steps in runs:
                _check_parts(_Trial(make).run(steps), _OnShards)
        except _Differs as found:
            raise Parallel3dError(
                f"optim.local: {name} is not elementwise: in a trial on whole parameters and on the shards "
                f"of two ranks {found}; give matrix=True to step on whole parameters, or use the class itself"
            ) from None
        except Exception as error:
            raise Parallel3dError(
                f"optim.local: {name} can't step on plain local tensors; a trial on parameters of {_SHAPES}, "
                f"whole and in flat shards, ended with {type(error).__name__}: {error}. Give matrix=True if "
                "it needs whole parameters"
            ) from error


def check_one_by_one(optimizer_class: type[Optimizer], options: Options, group: Options) -> None:
    """Checks on the CPU that stepping all parameters in one call gives what stepping each by itself gives.

    A class that fails in the first trial is not judged: the user's parameters may have what it needs.
    """
    name = optimizer_class.__name__
    eager = torch.compiler.set_stance("force_eager")  # these sizes are no example of the user's
    with _isolated(), eager:
        several = (_SHAPES, _MATRICES, _SQUARES)
        for shapes, dtype in product(several, (torch.float64, torch.float32)):
            runs = [_steps(k, shapes, dtype, torch.device("cpu")) for k in (_VARIED, _STEADY)]
            make = partial(_make, optimizer_class, options, group, runs[0][0][0])
            with suppress(Exception):  # sizes and a device that are not the user's
                trials = [_Trial(make).run(steps) for steps in runs]
                break
        else:
            return
        try:
            for whole in trials:
                _check_states_alike(whole)
                _check_parts(whole, _OneByOne)
        except _Differs as found:
            raise Parallel3dError(
                f"optim.local: {name} does something else to a parameter where there are others: in a trial "
                f"of all in one call, and one by one, {found}; each rank steps on some parameters only: use "
                "the class itself"
            ) from None
        except Exception as error:
            raise Parallel3dError(
                f"optim.local: {name} steps on several parameters, but a trial one by one ended with "
                f"{type(error).__name__}: {error}; use the class itself"
            ) from error


def check_states_are_plain(
    optimizer_class: type[Optimizer], options: Options, group: Options
) -> None:
    """Checks on the CPU that the state of a large parameter consists of ordinary tensors, which can be cut.

    A class that fails in this trial is not judged.
    """
    eager = torch.compiler.set_stance("force_eager")
    with _isolated(), eager:
        state: State = {}
        with suppress(Exception):
            optimizer = _make(optimizer_class, options, group, [torch.ones(_LARGE)])
            (param,) = optimizer.param_groups[0]["params"]
            param.grad = torch.ones(_LARGE)
            step_of(optimizer_class)(optimizer)
            state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
                raise Parallel3dError(
                    f"optim.local: {optimizer_class.__name__} keeps a {type(value).__name__} in the entry "
                    f"{key!r} of a parameter's state, which can't be cut by element nor be exchanged; use "
                    "the class itself on the model's DTensors"
                )


@contextmanager
def _isolated() -> Iterator[None]:
    """Runs the body as no rank in particular, and leaves the user's random state unchanged."""
    rng = torch.random.fork_rng(devices=[])
    grad = torch.enable_grad()
    with simulation_off(), dry_run.real(), rng, torch.inference_mode(False), grad:
        torch.default_generator.manual_seed(0)
        yield


def _check_parts(whole: _Trial, kind: type[_Trial]) -> None:
    """Raises _Differs unless the trials of two ranks give their parts of what ``whole`` has given.

    A closure may only bring the gradients, since ours is called before the step.
    """
    if "closure" in inspect.signature(whole.step_function).parameters:
        with_closure = _WithClosure(whole.make).run(whole.steps)
        if with_closure.other_calls:
            raise _Differs("it called its closure several times a step, or after changing weights")
        try:
            _compare_moved(with_closure.moved, whole.moved)
        except _Differs:
            raise _Differs(
                "it used the loss that a closure returns, which ranks don't share"
            ) from None
    for rank in (0, 1):
        trial = kind(whole.make, rank).run(whole.steps)
        _compare_moved(trial.moved, list(map(trial.parts, whole.moved)))
        _compare(_counts(trial.optimizer), _counts(whole.optimizer), "counts")
        for state, expected in zip(trial.states, trial.states_of(whole), strict=True):
            _compare(state, expected, "state")
            for key, value in state.items():
                _check_can_be_shared(key, value)


def _steps(
    kinds: Sequence[tuple[str, float]],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Step]:
    generator = torch.Generator().manual_seed(0)

    def randn() -> Tensors:
        return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    steps: list[Step] = []
    direction = randn()
    for kind, size in kinds:
        weights = randn()
        weights[2] = weights[2] * 1e-3  # a class may look at the sizes of weights
        noise = randn()
        if kind == "steady":
            noise = [d + 0.1 * n for d, n in zip(direction, noise, strict=True)]
        grads = [_gradient(kind, w, n) * size for w, n in zip(weights, noise, strict=True)]
        steps.append(([w.to(device, dtype) for w in weights], [g.to(device, dtype) for g in grads]))
    return steps


def _gradient(kind: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if kind == "along":
        return weight + 0.01 * noise
    if kind == "sparse":
        return noise * (torch.arange(len(noise)) % 2).view(-1, *[1] * (noise.dim() - 1))
    if kind == "orthogonal":  # in each row, and so as a whole
        w, g = (x.reshape(len(x) if x.dim() > 1 else 1, -1) for x in (weight, noise))
        return (g - w * (w * g).sum(1, True) / (w * w).sum(1, True)).view_as(weight)
    return noise


def _make(optimizer_class: type[Optimizer], options: Options, group: Options, like: Tensors) -> Any:
    """Returns an optimizer of new parameters, with lr 0.1: the user's may be 0."""
    params = [nn.Parameter(tensor.clone()) for tensor in like]
    optimizer = optimizer_class([{**group, "params": params}], **options)
    for made_group in optimizer.param_groups:
        lr = made_group.get("lr")
        if lr is not None:
            made_group["lr"] = lr.new_full((), 0.1) if isinstance(lr, torch.Tensor) else 0.1
    return optimizer


class _Trial:
    """An optimizer that steps on whole parameters in one call, as on the plain model.

    Attributes:
        params: what it steps on.
        steps: the steps it has taken.
        moved: by how much each step has moved ``params``.
    """

    def __init__(self, make: Make, rank: int = 0) -> None:
        self.make, self.rank = make, rank
        self.optimizer = make()
        self.params: list[nn.Parameter] = self.optimizer.param_groups[0]["params"]
        self.step_function = step_of(type(self.optimizer))  # without the user's hooks

    @property
    def states(self) -> list[State]:
        """The states of ``params``."""
        return [self.optimizer.state.get(p, {}) for p in self.params]

    def parts(self, wholes: Tensors) -> Tensors:
        """Returns the parts of tensors shaped as the whole parameters that belong to ``params``."""
        return wholes

    def states_of(self, whole: _Trial) -> list[State]:
        """Returns the states of ``whole`` as ``params`` would have them."""
        raise NotImplementedError

    def run(self, steps: list[Step]) -> Self:
        """Takes ``steps``."""
        torch.default_generator.manual_seed(0)  # a class that draws random numbers draws the same
        self.steps = steps
        self.moved: list[Tensors] = []
        for step in steps:
            weights, grads = map(self.parts, step)
            for param, weight, grad in zip(self.params, weights, grads, strict=True):
                with torch.no_grad():
                    param.copy_(weight)
                param.grad = grad.clone()
            self._call()
            for param in self.params:
                param.grad = None
            pairs = zip(self.params, self.parts(step[0]), strict=True)
            self.moved.append([param.detach() - weight for param, weight in pairs])
        return self

    def _call(self) -> None:
        self.step_function(self.optimizer)


class _WithClosure(_Trial):
    """The same with a closure, which returns another loss at each call.

    Attributes:
        other_calls: number of calls beyond the first in a step, or after weights had changed.
    """

    other_calls = _calls = 0

    def _call(self) -> None:
        before, calls = [p.detach().clone() for p in self.params], 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            self.other_calls += calls > 1 or not all(map(torch.equal, self.params, before))
            self._calls += 1
            return before[0].new_tensor(7.0 / self._calls)

        self.step_function(self.optimizer, closure)


class _OnShards(_Trial):
    """One rank's shards, as ``LocalState`` has them: several parameters as one flat tensor, one alone."""

    def __init__(self, make: Make, rank: int = 0) -> None:
        super().__init__(make, rank)
        wholes = self.params
        states = [self.optimizer.state.pop(param, {}) for param in wholes]
        self.params = [nn.Parameter(part) for part in self.parts([p.detach() for p in wholes])]
        own: defaultdict[Any, State] = defaultdict(dict)
        for param, state in zip(self.params, self._shard(states, wholes), strict=True):
            if state:  # made by the constructor
                own[param] = state
        own.update(self.optimizer.state)
        self.optimizer.state = own
        self.optimizer.param_groups[0]["params"] = self.params

    def parts(self, wholes: Tensors) -> Tensors:
        *flat, alone = [whole.chunk(2)[self.rank].clone() for whole in wholes]
        return [torch.cat([part.flatten() for part in flat]), alone]

    def states_of(self, whole: _Trial) -> list[State]:
        return self._shard(whole.states, whole.params)

    def _shard(self, states: list[State], params: Sequence[torch.Tensor]) -> list[State]:
        if any(state.keys() != states[0].keys() for state in states):
            raise _Differs("its state has other entries for some parameters than for others")
        parts: list[State] = [{}, {}]
        for key, first in states[0].items():
            values = [state[key] for state in states]
            _check_can_be_shared(key, first)
            if isinstance(first, torch.Tensor) and first.dim():
                if any(v.shape != p.shape for v, p in zip(values, params, strict=True)):
                    raise _Differs(f"the entry {key!r} of its state is not shaped as the parameter")
                parts[0][key], parts[1][key] = self.parts(values)
                continue
            for value in values:
                _compare(value, first, key)
            for part in parts:
                part[key] = first.clone() if isinstance(first, torch.Tensor) else first
        return parts


class _OneByOne(_Trial):
    """One rank's steps, as ``MatrixSteps`` has them: on every second parameter, one in a call."""

    def __init__(self, make: Make, rank: int = 0) -> None:
        super().__init__(make, rank)
        self.params = self.optimizer.param_groups[0]["params"] = self.params[rank::2]
        self._steps = MatrixSteps(at_once=1)

    def parts(self, wholes: Tensors) -> Tensors:
        return wholes[self.rank :: 2]

    def states_of(self, whole: _Trial) -> list[State]:
        return whole.states[self.rank :: 2]

    def _call(self) -> None:
        self._steps.step(self.optimizer, self.step_function)


def _check_states_alike(whole: _Trial) -> None:
    """Raises _Differs unless parameters of one shape have state of the same shapes: ranks exchange it."""
    known: dict[torch.Size, dict[str, Any]] = {}
    for param, state in zip(whole.params, whole.states, strict=True):
        shapes = {k: v.shape if isinstance(v, torch.Tensor) else type(v) for k, v in state.items()}
        if known.setdefault(param.shape, shapes) != shapes:
            raise _Differs("two of one shape had state of different shapes")


def _check_can_be_shared(key: str, value: Any) -> None:
    if not can_be_shared(value):
        kind = type(value).__name__
        raise _Differs(f"the entry {key!r} of its state is a {kind}, which can't be sharded")


def _counts(optimizer: Any) -> dict[str, Any]:
    """Returns what the optimizer keeps that is no parameter's: numbers, group options, other state."""
    counts = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
    for key, value in optimizer.param_groups[0].items():
        if key not in ("params", "param_names"):
            counts[f"{key!r} in a group"] = value
    return counts | {f"state[{k!r}]": v for k, v in of_no_parameter(optimizer).items()}


def _compare_moved(moved: list[Tensors], expected: list[Tensors]) -> None:
    """Raises _Differs unless the parameters have moved alike in each step."""
    for step, expected_step in zip(moved, expected, strict=True):
        for a, b in zip(step, expected_step, strict=True):
            if not _close(a, b, atol=1e-14):  # rounding in the difference of two weights
                apart = float((a - b).abs().max() / b.abs().max())
                raise _Differs(f"a parameter moved differently (by {apart:.1e} of its movement)")


def _compare(value: Any, expected: Any, name: Any) -> None:
    """Raises _Differs for numbers and tensors that differ; of anything else only the type is compared."""
    kinds: tuple[Any, ...] = (torch.Tensor, (int, float), dict, (list, tuple))
    kind = next((k for k in kinds if isinstance(value, k) and isinstance(expected, k)), None)
    if kind is torch.Tensor:
        same = value.shape == expected.shape and _close(value.detach(), expected.detach())
    elif kind == (int, float):
        both_nan = value != value and expected != expected
        same = both_nan or math.isclose(value, expected, rel_tol=1e-6)
    elif kind is dict:
        if value.keys() != expected.keys():
            keys = sorted(map(str, value.keys() ^ expected.keys()))
            raise _Differs(f"its {name} had other entries: {', '.join(keys)}")
        for key in value:
            _compare(value[key], expected[key], key)
        return
    elif kind is not None:
        same = len(value) == len(expected)
        for a, b in zip(value, expected, strict=False):
            _compare(a, b, name)
    else:
        same = type(value) is type(expected)
    if not same:
        raise _Differs(f"its {name} differed ({_brief(value)} and {_brief(expected)})")


def _close(a: torch.Tensor, b: torch.Tensor, atol: float = 0.0) -> bool:
    if not (a.is_floating_point() and b.is_floating_point()):
        return torch.equal(a, b)
    rtol = 1e-9 if a.dtype is b.dtype is torch.float64 else 1e-6
    a, b = a.double().cpu(), b.double().cpu()
    finite = b[b.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=0, atol=rtol * largest + atol, equal_nan=True)


def _brief(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else repr(value).replace("\n", "")
    return text if len(text) < 60 else text[:57] + "..."
