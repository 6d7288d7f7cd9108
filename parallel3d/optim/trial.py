"""The guard of ``optim.local``: what is said of an optimizer class is tried on a few numbers.

A trial proves nothing: a class may treat other numbers, or later steps, differently. It refuses what it
catches. Two times twelve steps on a few small parameters, each from new weights: first with gradients that
are random, orthogonal to the weights, large, small and partly zero, which projections, clipping, trust
ratios and warm-ups need to show; then with gradients that point one way, as estimates of the step size do.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel3d._torch.simulated import simulation_off
from parallel3d._util import dry_run
from parallel3d.errors import Parallel3dError
from parallel3d.optim.matrix import MatrixSteps, can_be_shared, of_no_parameter
from parallel3d.optim.pieces import State

# Optimizer classes: those known to be elementwise, each with its reason; and their step.

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
"""Name in ``torch.optim`` -> why what it does to a number depends on no other number.

Not among them: Muon (orthogonal matrices), Adafactor (rows' and columns' means), LBFGS
(inner products) and SparseAdam.
"""


def is_known_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is one of ``ELEMENTWISE`` itself: a subclass may do anything in its step."""
    return any(optimizer_class is getattr(torch.optim, name, None) for name in ELEMENTWISE)


def step_of(optimizer_class: Any) -> Callable[..., Any]:
    """Its ``step`` without the hooks that torch has put around it."""
    step = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_SHAPES = ((4, 6), (6,), (4, 6), (5, 3), (2, 3, 2, 2))
_MATRICES = ((4, 6), (5, 3), (4, 6))
_SQUARES = ((5, 5),) * 4  # for those that take their parameters in pairs
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

Step = tuple[list[torch.Tensor], list[torch.Tensor]]  # weights before it, gradients
Options = dict[str, Any]


class _Differs(Exception):
    """What of an optimizer came out differently."""


def check_elementwise(
    optimizer_class: type[Optimizer], options: Options, group: Options, device: torch.device
) -> None:
    """Steps whole parameters, and the flat shards that two ranks would have: each must come out the same.

    Args:
        options: what it is constructed with.
        group: what the first group of parameters has of its own, which the class may ask for.
        device: where it will step, which some options depend on.

    Raises:
        Parallel3dError: it is not elementwise, or does not step on plain dense tensors at all.
        Exception: what the class itself raises for the options.
    """
    name = optimizer_class.__name__
    with _apart():
        runs = [_steps(kinds, _SHAPES, torch.float64, device) for kinds in (_VARIED, _STEADY)]
        make = _maker(optimizer_class, options, group, runs[0][0][0])
        # What the class says of the options is for the user; not so what it says of our shapes.
        _maker(optimizer_class, options, group, runs[0][0][0][:1])()
        try:
            for steps in runs:
                whole, ends = _stepped(_Whole(make, optimizer_class), steps)
                _check_closure(make, optimizer_class, steps, ends)
                for rank in (0, 1):
                    _check_part(_OnShards(make, optimizer_class, rank), steps, whole, ends)
        except _Differs as found:
            raise Parallel3dError(
                f"optim.local: {name} is not elementwise: in a trial on whole parameters and on the shards "
                f"of two ranks {found}, so that on shards it would not do what it does to the plain model; "
                "give matrix=True, and it is given whole parameters, or use the class itself"
            ) from None
        except Exception as error:
            raise Parallel3dError(
                f"optim.local: {name} can't step on plain local tensors; a trial on parameters of "
                f"{_SHAPES}, whole and in flat shards, ended with {type(error).__name__}: {error}. "
                "Elementwise optimizers work, and with matrix=True those that need whole parameters"
            ) from error


def check_one_by_one(optimizer_class: type[Optimizer], options: Options, group: Options) -> None:
    """Steps parameters all in one call, and one by one on two ranks, on the CPU: each must come out the same.

    A class that fails at the first is not judged: the user's parameters may have what it needs.

    Raises:
        Parallel3dError: it looks at all its parameters together.
    """
    name = optimizer_class.__name__
    eager = torch.compiler.set_stance("force_eager")  # these sizes are no example of the user's
    with _apart(), eager:
        several = (_SHAPES, _MATRICES, _SQUARES)
        for shapes, dtype in product(several, (torch.float64, torch.float32)):
            runs = [_steps(k, shapes, dtype, torch.device("cpu")) for k in (_VARIED, _STEADY)]
            make = _maker(optimizer_class, options, group, runs[0][0][0])
            try:
                wholes = [_stepped(_Whole(make, optimizer_class), steps) for steps in runs]
                break
            except Exception:  # of a trial on sizes and a device that are not the user's
                continue
        else:
            return
        try:
            for steps, (whole, ends) in zip(runs, wholes, strict=True):
                _check_closure(make, optimizer_class, steps, ends)
                _check_alike(whole)
                for rank in (0, 1):
                    _check_part(_OneByOne(make, optimizer_class, rank), steps, whole, ends)
        except _Differs as found:
            raise Parallel3dError(
                f"optim.local: {name} does something else to a parameter where there are others: in a trial "
                f"of all in one call, and one by one, {found}; the ranks step on different ones, so that it "
                "would not do what it does to the plain model; use one that treats parameters one by one, or "
                "the class itself"
            ) from None
        except Exception as error:
            raise Parallel3dError(
                f"optim.local: {name} steps on several parameters, but a trial one by one ended with "
                f"{type(error).__name__}: {error}; use one that treats parameters one by one, or the class "
                "itself"
            ) from error


@contextmanager
def _apart() -> Iterator[None]:
    """Not as any rank in particular, and without a trace in the user's random numbers."""
    real, rng = dry_run.real(), torch.random.fork_rng(devices=[])
    with simulation_off(), real, rng, torch.inference_mode(False), torch.enable_grad():
        _seed()
        yield


def _seed() -> None:
    torch.default_generator.manual_seed(0)


def _stepped(trial: _Trial, steps: list[Step]) -> tuple[_Trial, list[list[torch.Tensor]]]:
    """``trial``, and what each of ``steps`` has moved."""
    _seed()  # whoever draws random numbers draws the same
    moved = []
    for step in steps:
        trial.step(step)
        moved.append(trial.moved(step))
    return trial, moved


def _check_part(
    trial: _Trial, steps: list[Step], whole: _Trial, ends: list[list[torch.Tensor]]
) -> None:
    """Raises _Differs unless ``steps`` do to one rank's ``trial`` its part of what they did to the ``whole``,
    by ``ends``."""
    _, moved = _stepped(trial, steps)
    for mine, end in zip(moved, ends, strict=True):
        _compare(mine, trial.parts(end))
    trial.compare_state(whole)


def _check_closure(
    make: Callable[[], Any],
    optimizer_class: type[Optimizer],
    steps: list[Step],
    ends: list[list[torch.Tensor]],
) -> None:
    """Raises _Differs if a closure does more than to bring the gradients: ours are called before the step."""
    step = step_of(optimizer_class)
    if "closure" not in inspect.signature(step).parameters:
        return
    trial = _WithClosure(make, optimizer_class)
    _, moved = _stepped(trial, steps)
    if trial.others:
        raise _Differs(
            "it called its closure several times a step, or after it had changed weights"
        )
    try:
        for a, b in zip(moved, ends, strict=True):
            _compare(a, b)
    except _Differs:
        raise _Differs(
            "it used the loss that a closure returns, which is another one on each rank"
        ) from None


def _steps(
    kinds: Sequence[tuple[str, float]],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Step]:
    generator = torch.Generator().manual_seed(0)
    steps: list[Step] = []
    ways = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    for kind, size in kinds:
        starts = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        starts[2] = starts[2] * 1e-3  # a class may look at sizes of weights
        noise = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        if kind == "steady":
            noise = [way + 0.1 * each for way, each in zip(ways, noise, strict=True)]
        grads = [_gradient(kind, w, g) * size for w, g in zip(starts, noise, strict=True)]
        steps.append(
            ([w.to(device, dtype) for w in starts], [g.to(device, dtype) for g in grads]),
        )
    return steps


def _gradient(kind: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if kind == "along":
        return weight + 0.01 * noise
    if kind == "sparse":
        return noise * (torch.arange(len(noise)) % 2).view(-1, *[1] * (noise.dim() - 1))
    if kind == "orthogonal":  # row by row, and so as a whole
        w, g = (x.reshape(len(x) if x.dim() > 1 else 1, -1) for x in (weight, noise))
        return (g - w * (w * g).sum(1, True) / (w * w).sum(1, True)).view_as(weight)
    return noise


def _maker(
    optimizer_class: type[Optimizer], options: Options, group: Options, like: list[torch.Tensor]
) -> Callable[[], Any]:
    """Makes an optimizer of its own parameters, with a rate that shows: the user's may be zero at first."""

    def make() -> Any:
        params = [nn.Parameter(tensor.clone()) for tensor in like]
        made = optimizer_class([{**group, "params": params}], **options)
        for each in made.param_groups:
            lr = each.get("lr")
            if lr is not None:
                each["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, torch.Tensor) else 0.1
        return made

    return make


class _Trial:
    """An optimizer, and what it steps on.

    Attributes:
        params: that.
    """

    def __init__(self, make: Callable[[], Any], optimizer_class: type[Optimizer]) -> None:
        self.optimizer = make()
        self.params: list[nn.Parameter] = self.optimizer.param_groups[0]["params"]
        self._step = step_of(optimizer_class)  # without the hooks of the user's

    @property
    def states(self) -> list[State]:
        return [self.optimizer.state.get(p, {}) for p in self.params]

    def parts(self, wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        """What ``params`` are of tensors that are as the whole parameters are."""
        return wholes

    def step(self, step: Step) -> None:
        """From the weights and with the gradients of ``step``."""
        weights, grads = map(self.parts, step)
        for param, weight, grad in zip(self.params, weights, grads, strict=True):
            with torch.no_grad():
                param.copy_(weight)
            param.grad = grad.clone()
        self._call()
        for param in self.params:
            param.grad = None

    def _call(self) -> None:
        self._step(self.optimizer)

    def moved(self, step: Step) -> list[torch.Tensor]:
        """What the step has done to each of ``params``."""
        before = self.parts(step[0])
        return [p.detach() - w for p, w in zip(self.params, before, strict=True)]

    def compare_state(self, whole: _Trial) -> None:
        """Raises _Differs unless this one's state is that part of the ``whole`` one's."""
        _compare_numbers(_counts(self.optimizer), _counts(whole.optimizer))
        for mine, theirs in zip(self.states, self._states(whole), strict=True):
            _compare_states(mine, theirs)

    def _states(self, whole: _Trial) -> list[State]:
        """Those of ``whole``, as ``params`` would have them."""
        raise NotImplementedError


class _Whole(_Trial):
    """All whole parameters in one call: what it does to the plain model."""


class _WithClosure(_Trial):
    """The same, with a closure that returns other losses.

    Attributes:
        others: calls of the closure but for the first in a step, or of one after weights had changed.
    """

    others = 0

    def _call(self) -> None:
        before, calls = [p.detach().clone() for p in self.params], 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            self.others += calls > 1 or not all(map(torch.equal, self.params, before))
            self._losses += 1
            return before[0].new_tensor(7.0 / self._losses)

        self._step(self.optimizer, closure)

    _losses = 0


class _OnShards(_Trial):
    """As ``LocalState`` has it: some parameters' shards as one flat tensor, and one by itself."""

    def __init__(
        self, make: Callable[[], Any], optimizer_class: type[Optimizer], rank: int
    ) -> None:
        super().__init__(make, optimizer_class)
        self._rank = rank
        made = self.params
        states: defaultdict[Any, State] = defaultdict(dict)
        wholes = [self.optimizer.state.pop(param, {}) for param in made]
        self.params = [nn.Parameter(part) for part in self.parts([p.detach() for p in made])]
        for param, state in zip(self.params, self._of_wholes(wholes, made), strict=True):
            if state:  # made by the constructor
                states[param] = state
        states.update(self.optimizer.state)
        self.optimizer.state = states
        self.optimizer.param_groups[0]["params"] = self.params

    def parts(self, wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        *flat, alone = [whole.chunk(2)[self._rank].clone() for whole in wholes]
        return [torch.cat([part.flatten() for part in flat]), alone]

    def _states(self, whole: _Trial) -> list[State]:
        return self._of_wholes(whole.states, whole.params)

    def _of_wholes(self, states: list[State], params: Sequence[torch.Tensor]) -> list[State]:
        if any(state.keys() != states[0].keys() for state in states):
            raise _Differs("its state has other entries for some parameters than for others")
        parts: list[State] = [{}, {}]
        for key, first in states[0].items():
            values = [state[key] for state in states]
            _check_can_be_shared(key, first)
            if isinstance(first, torch.Tensor) and first.dim():
                if any(v.shape != p.shape for v, p in zip(values, params, strict=True)):
                    raise _Differs(
                        f"the entry {key!r} of its state is not shaped as the parameter is"
                    )
                for part, value in zip(parts, self.parts(values), strict=True):
                    part[key] = value
                continue
            for value in values:
                _compare_values(value, first, key)
            for part in parts:
                part[key] = first.clone() if isinstance(first, torch.Tensor) else first
        return parts


class _OneByOne(_Trial):
    """As ``MatrixSteps`` has it: this rank steps on every second parameter, one in a call."""

    def __init__(
        self, make: Callable[[], Any], optimizer_class: type[Optimizer], rank: int
    ) -> None:
        super().__init__(make, optimizer_class)
        self._rank = rank
        self.params = self.optimizer.param_groups[0]["params"] = self.params[rank::2]
        self._steps = MatrixSteps(at_once=1)

    def parts(self, wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        return wholes[self._rank :: 2]

    def _call(self) -> None:
        self._steps.step(self.optimizer, self._step)

    def _states(self, whole: _Trial) -> list[State]:
        return whole.states[self._rank :: 2]


def _check_alike(whole: _Trial) -> None:
    """Raises _Differs unless parameters of one shape have state of the same shapes: ranks exchange it."""
    known: dict[torch.Size, dict[str, Any]] = {}
    for param, state in zip(whole.params, whole.states, strict=True):
        shapes = {k: v.shape if isinstance(v, torch.Tensor) else type(v) for k, v in state.items()}
        if known.setdefault(param.shape, shapes) != shapes:
            raise _Differs("two of one shape had state of different shapes")


def _counts(optimizer: Any) -> dict[str, Any]:
    """What it counts, but for parameters' state."""
    counts: dict[str, Any] = {k: v for k, v in vars(optimizer).items() if _is_number(v)}
    counts.update((f"{k!r} in a group", v) for k, v in optimizer.param_groups[0].items())
    for key, entry in of_no_parameter(optimizer).items():
        counts[f"state[{key!r}]"] = entry
    return {
        name: value
        for name, value in counts.items()
        if name not in ("'params' in a group", "'param_names' in a group")
    }


def _compare_numbers(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    if mine.keys() != theirs.keys():
        raise _Differs(f"it had other entries: {', '.join(sorted(mine.keys() ^ theirs.keys()))}")
    for name, value in mine.items():
        _compare_values(value, theirs[name], name)


def _compare_states(mine: State, theirs: State) -> None:
    if mine.keys() != theirs.keys():
        raise _Differs(f"its state had other entries: {sorted(mine.keys() ^ theirs.keys())}")
    for key, value in mine.items():
        _check_can_be_shared(key, value)
        _compare_values(value, theirs[key], key)


def _check_can_be_shared(key: str, value: Any) -> None:
    if not can_be_shared(value):
        raise _Differs(
            f"the entry {key!r} of its state is a {type(value).__name__}, which can't be sharded"
        )


def _compare_values(mine: Any, theirs: Any, name: Any) -> None:
    """Raises _Differs for numbers and tensors that differ; what is neither is not compared."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = mine.shape == theirs.shape and (
            not mine.numel() or _close(mine.detach(), theirs.detach(), least=0.0)
        )
    elif _is_number(mine) and _is_number(theirs):
        same = math.isclose(mine, theirs, rel_tol=1e-6) or (mine != mine and theirs != theirs)
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        _compare_numbers(mine, theirs)
        return
    elif isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        same = len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=False):
            _compare_values(a, b, name)
    else:
        same = type(mine) is type(theirs)
    if not same:
        raise _Differs(f"its {name} differed ({_brief(mine)} and {_brief(theirs)})")


def _compare(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Raises _Differs unless both have moved alike."""
    for a, b in zip(mine, theirs, strict=True):
        if not _close(a, b):
            apart = (a - b).abs().max() / b.abs().max()
            raise _Differs(f"a parameter moved differently (by {float(apart):.1e} of its movement)")


def _close(a: torch.Tensor, b: torch.Tensor, least: float = 1e-14) -> bool:
    """``least``: what the difference of two weights may be by rounding."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return torch.equal(a, b)
    rtol = 1e-9 if a.dtype is b.dtype is torch.float64 else 1e-6
    a, b = a.double().cpu(), b.double().cpu()
    finite = b[b.isfinite()].abs()
    size = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=0, atol=rtol * size + least, equal_nan=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _brief(value: Any) -> str:
    shown = f"{value:.3g}" if isinstance(value, float) else repr(value).replace("\n", "")
    return shown if len(shown) < 60 else shown[:57] + "..."
