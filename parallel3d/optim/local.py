"""optim.local: an optimizer that steps on plain local tensors and shows DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.kernels import foreach_copy_, foreach_zero_, local_tensors, specs_of
from parallel3d.errors import Parallel3dError
from parallel3d.optim.matrix import MatrixSteps
from parallel3d.optim.pieces import Apart, ParamPiece, Piece, RunPiece, State, pieces_of
from parallel3d.optim.trial import (
    ELEMENTWISE,
    check_elementwise,
    check_one_by_one,
    is_known_elementwise,
    step_of,
)

# Snapshot: whether a dict of dicts still has the very objects that it had.


class Snapshot:
    """What an optimizer's state consisted of, compared object by object.

    A step compares hundreds of entries: no Python frame, and no hash of a tensor, for any of them.
    """

    def __init__(self, state: dict[Any, Any]) -> None:
        self._keys, self._entries = list(state), list(state.values())
        self._dicts = [entry for entry in self._entries if isinstance(entry, dict)]
        self._lengths = list(map(len, self._dicts))
        alike: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
        for entry in self._dicts:
            alike.setdefault(tuple(entry), []).append(entry)
        self._alike = [_Alike(names, entries) for names, entries in alike.items() if names]

    def shows(self, state: dict[Any, Any]) -> bool:
        """Whether ``state`` has the same keys and entries in the same order, with the same content."""
        return (
            len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._entries))
            and list(map(len, self._dicts)) == self._lengths
            and all(entries.are_same for entries in self._alike)
        )


class _Alike:
    """Entries with the same names: no Python code for each."""

    def __init__(self, names: tuple[Any, ...], entries: list[dict[Any, Any]]) -> None:
        # A second time, as one name alone would bring no tuple.
        self._read, self._entries = itemgetter(*names, names[0]), entries
        self._values = list(chain.from_iterable(map(self._read, entries)))

    @property
    def are_same(self) -> bool:
        """Whether all names are there, with the same objects."""
        try:
            now = chain.from_iterable(map(self._read, self._entries))
            return all(map(is_, now, self._values))
        except KeyError:
            return False


# Singles: the parameters that are stepped on one by one, looked at all at once.

_grad_of, _dtype_of = attrgetter("grad"), attrgetter("dtype")


class Singles:
    """The pieces of DTensor Parameters among ``pieces`` that are of one parameter.

    There may be hundreds, and a step is not much more than a look at each: no Python code for one of which
    nothing has changed.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = [
            piece
            for piece in pieces
            if isinstance(piece, ParamPiece) and isinstance(piece.params[0], DTensor)
        ]
        self._params = [piece.params[0] for piece in self.pieces]
        self._locals = local_tensors(self._params)
        self._tensors = [piece.tensor for piece in self.pieces]
        # Of the last gradients, which were reduced: descriptions, which there were, and what dtypes they had.
        self._specs: list[Any] = []
        self._there: list[int] = []
        self._dtypes: list[torch.dtype] = []

    @property
    def is_current(self) -> bool:
        """Whether the parameters still live in the pieces."""
        return all(map(is_, local_tensors(self._params), self._locals))

    def set_gradients(self) -> None:
        """Gives the pieces theirs.

        Raises:
            StateError: one waits for its reduction.
        """
        grads = list(map(_grad_of, self._params))
        found = self._known(grads)
        if found is None:
            found = [piece.gradient() for piece in self.pieces]
            self._remember(grads)
        for tensor, grad in zip(self._tensors, found, strict=True):
            tensor.grad = grad

    def _known(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Local gradients, if all are described as the last ones, which were looked at."""
        if len(self._specs) != len(grads) or not all(map(is_, _specs(grads), self._specs)):
            return None
        every = len(self._there) == len(grads)
        there: Any = grads if every else [grads[i] for i in self._there]
        locals_: Any = local_tensors(there)
        if not all(map(is_, map(_dtype_of, locals_), self._dtypes)):
            return None
        if every:
            return locals_
        found: list[torch.Tensor | None] = [None] * len(grads)
        for i, local in zip(self._there, locals_, strict=True):
            found[i] = local
        return found

    def _remember(self, grads: list[torch.Tensor | None]) -> None:
        self._specs = _specs(grads)
        self._there = [i for i, grad in enumerate(grads) if grad is not None]
        self._dtypes = [self._tensors[i].dtype for i in self._there]


def _specs(grads: list[torch.Tensor | None]) -> list[Any]:
    """Nothing if one is no DTensor."""
    try:
        return specs_of(grads)
    except AttributeError:
        return []


# LocalState: what an optimizer on local tensors steps on, beside what the user sees of it.


class LocalState:
    """The pieces of all groups, and the state that the optimizer has for them.

    Attributes:
        by_group: the groups' pieces.
        singles: those of one DTensor. ``others``: the other ones.
        state: what the optimizer sees as its state.
        published: parameter -> (its entry in the state that is shown, the values in it).
        copies: (piece's tensor, key) -> (a number of the piece's state seen as a vector, one copy of it
            for each parameter, the version of these): each has a count of steps of its own, to be saved and
            loaded.
    """

    def __init__(self, groups: list[dict[str, Any]], shown: dict[Any, State]) -> None:
        self.params = [list(group["params"]) for group in groups]
        self.by_group: list[list[Piece]] = []
        self.state: defaultdict[Any, State] = defaultdict(dict)
        self.published: dict[nn.Parameter, tuple[State, list[Any]]] = {}
        self.last: dict[nn.Parameter, State] = {}
        self.copies: dict[Any, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.stepped: Snapshot | None = None  # ``state`` as it was published
        self.shown: Snapshot | None = None  # and what was shown then
        for group in groups:
            self.by_group.append([])
            for piece in pieces_of(group["params"]):
                self.by_group[-1] += self._joined(piece, shown)
        params = {param for params in self.params for param in params}
        self.state.update({k: v for k, v in shown.items() if k not in params})
        self._sort()
        self.publish(shown)

    def _sort(self) -> None:
        """By how they are looked at in each step."""
        pieces = list(chain.from_iterable(self.by_group))
        self.singles = Singles(pieces)
        alone = set(map(id, self.singles.pieces))
        self.others = [piece for piece in pieces if id(piece) not in alone]
        self.tensors = [[piece.tensor for piece in mine] for mine in self.by_group]
        self.own = [piece.tensor for piece in pieces if piece.tensor is not piece.params[0]]
        self.padding = list(chain.from_iterable(piece.padding for piece in pieces))

    def _joined(self, piece: Piece, shown: dict[Any, State]) -> list[Piece]:
        """``piece`` with the state that is shown; in parts where its parameters' don't fit together."""
        states = [shown.get(param, {}) for param in piece.params]
        state = piece.join(states)
        if state is None:  # its parameters have been stepped on differently
            assert isinstance(piece, RunPiece)
            return [part for p in piece.divided(states) for part in self._joined(p, shown)]
        if state:
            self.state[piece.tensor] = state
        return [piece]

    def _divided(self, piece: RunPiece, shown: dict[Any, State]) -> list[Piece]:
        """Pieces in place of ``piece`` whose gradients go together; the memory of the state stays."""
        state = self.state.get(piece.tensor, {})
        self._forget(piece)
        parts = piece.divided()
        for part in parts:
            if not isinstance(part, RunPiece):
                self._joined(part, shown)
            elif state:
                self.state[part.tensor] = part.state_of(piece, state)
        return parts

    def is_current(self, groups: list[dict[str, Any]], shown: dict[Any, State]) -> bool:
        """Whether neither groups nor parameters nor state were changed from outside."""
        return (
            len(groups) == len(self.params)
            and all(
                len(group["params"]) == len(params) and all(map(is_, group["params"], params))
                for group, params in zip(groups, self.params, strict=True)
            )
            and self.singles.is_current
            and all(piece.is_current for piece in self.others)
            and all(copies._version == version for _, copies, version in self.copies.values())
            and self._shows(shown)
        )

    def _shows(self, shown: dict[Any, State]) -> bool:
        """Whether ``shown`` has what was published."""
        if self.shown is not None and self.shown.shows(shown):
            return True
        self.shown = None
        return all(self._is_as_published(param, shown) for param in chain(*self.params))

    def _is_as_published(self, param: nn.Parameter, shown: dict[Any, State]) -> bool:
        entry = shown.get(param)
        known = self.published.get(param)
        if entry is None or known is None:
            return not entry and known is None
        return (
            entry is known[0]
            and len(entry) == len(known[1])
            and all(map(is_, entry.values(), known[1]))
        )

    def _find_gradients(self, shown: dict[Any, State]) -> None:
        """Gives the pieces theirs; divides those whose parameters' don't fit together any more."""
        divided = {}
        for piece in self.others:
            try:
                self._set_gradient(piece)
            except Apart:
                assert isinstance(piece, RunPiece)
                divided[id(piece)] = self._divided(piece, shown)
        if divided:
            for pieces in self.by_group:
                pieces[:] = [part for p in pieces for part in divided.get(id(p), (p,))]
            self._sort()
            self.stepped = None
            for part in chain.from_iterable(divided.values()):
                if isinstance(part, RunPiece):
                    self._set_gradient(part)
        self.singles.set_gradients()

    def _set_gradient(self, piece: Piece) -> None:
        if piece.tensor is not piece.params[0]:
            piece.tensor.grad = piece.gradient()

    def _forget(self, piece: Piece) -> None:
        self.last.pop(piece.tensor, None)
        for key in self.state.pop(piece.tensor, {}):
            self.copies.pop((piece.tensor, key), None)

    @contextmanager
    def shown_to(self, optimizer: Any) -> Iterator[None]:
        """Within it ``optimizer`` has the pieces, their gradients and their state."""
        groups, shown = optimizer.param_groups, optimizer.state
        try:
            with torch.no_grad():
                self._find_gradients(shown)
            for group, tensors in zip(groups, self.tensors, strict=True):
                group["params"] = list(tensors)
            optimizer.state = self.state
            yield
        finally:
            optimizer.state = shown
            for group, params in zip(groups, self.params, strict=True):
                group["params"] = list(params)
            for tensor in self.own:
                tensor.grad = None
            if self.padding:
                with torch.no_grad():
                    foreach_zero_(self.padding)

    def publish(self, shown: dict[Any, State]) -> None:
        """Shows what is new in the state since the last time; the rest is the same memory."""
        if self.stepped is None or not self.stepped.shows(self.state):
            self._publish_all(shown)
            self.stepped = Snapshot(self.state)
            self.shown = None
        if (
            self.shown is None
        ):  # else it is as ``is_current`` has found it: a step sees another state
            self.shown = Snapshot(shown)
        if self.copies:
            wide, copies, _ = map(list, zip(*self.copies.values(), strict=True))
            with torch.no_grad():
                foreach_copy_(copies, wide)
            for place, (number, mine, _) in self.copies.items():
                self.copies[place] = number, mine, mine._version

    def _publish_all(self, shown: dict[Any, State]) -> None:
        tensors = set()
        for pieces in self.by_group:
            for piece in pieces:
                tensors.add(piece.tensor)
                state = self.state.get(piece.tensor)
                if state is not None:
                    self._publish(piece, state, shown)
        for key, value in self.state.items():
            if key not in tensors:
                shown[key] = value

    def _publish(self, piece: Piece, state: State, shown: dict[Any, State]) -> None:
        last = self.last.get(piece.tensor)
        if last is not None and len(last) == len(state):
            unchanged = all(last.get(key) is value for key, value in state.items())
            if unchanged:  # the same memory: it shows the new values already
                return
        entries: list[State] = [{} for _ in piece.params]
        for key, value in state.items():
            by_param = [value] * len(entries)
            if last is not None and last.get(key) is value:
                by_param = [shown[param][key] for param in piece.params]
            elif piece.is_elementwise(value):
                by_param = piece.shown(value)
            elif isinstance(value, torch.Tensor) and len(entries) > 1:
                with torch.no_grad():
                    wide = value.detach().expand(len(entries))
                    copies = wide.clone()
                self.copies[piece.tensor, key] = wide, copies, copies._version
                by_param = list(copies.unbind())
            for entry, part in zip(entries, by_param, strict=True):
                entry[key] = part
        for param, entry in zip(piece.params, entries, strict=True):
            shown[param] = entry
            self.published[param] = (entry, list(entry.values()))
        self.last[piece.tensor] = dict(state)


_REFUSED = {
    "LBFGS": "it needs inner products over the whole model; use it on a plain model",
    "SparseAdam": "gradients of sharded parameters are dense; use Adam",
}
_MATRIX = ("Muon", "Adafactor")  # torch's


def local(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Any],
    *,
    matrix: bool | None = None,
    elementwise: bool = False,
    **options: Any,
) -> Optimizer:
    """Makes an ``optimizer_class`` that steps on this rank's plain tensors, not on DTensors::

        optimizer = p3d.optim.local(torch.optim.AdamW, model, lr=1e-3)

    Everything else sees what it would see of the class itself: it is one (a subclass's object), its
    ``param_groups`` have the DTensor Parameters, ``state`` and ``state_dict()`` DTensors placed as they are.
    So schedulers, ``torch.distributed.checkpoint`` and its ``get_optimizer_state_dict`` take it like any
    other, and what it saved loads on other meshes.

    An elementwise class steps on a bucket's whole flat buffer where one group has all of it: a few tensors
    per unit. Its state is then flat as well; those of ``state`` are views. torch's ASGD, Adadelta, Adagrad,
    Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop and SGD are known to be elementwise (these classes
    themselves: a subclass may do anything). Of any other class you must say so, by ``elementwise=True``.

    One that is not (Muon, Adafactor, or what is said to be by ``matrix``) is given whole parameters, so that
    it does what it does to the plain model: parameters of one shape are dealt out to the ranks that share
    them, each steps on its own, and the parts go back, by all-to-alls. State shaped as the parameter stays
    sharded between steps, other tensors (Adafactor's factors) are kept by every rank. All ranks must have
    gradients of the same parameters. A class that looks at all parameters together works in neither way;
    use it itself on the model's DTensors, which is right or an error of DTensor's.

    What you say is tried on a few small parameters, and refused if that shows otherwise. The trial proves
    nothing: a class that clips at a norm which the trial doesn't reach passes.

    Args:
        params: a module, or what the class itself takes: tensors, (name, tensor) pairs, groups as dicts.
        matrix: True asserts that a step on a parameter depends on this parameter, its gradient and its
            state, all whole, and on no other parameter; nor on random numbers. None: as the class says
            (attribute ``whole_matrix``), True for torch's Muon and Adafactor.
        elementwise: True asserts that what a step does to a number depends on this number, its gradient, its
            state, the group's options and the count of steps, and on no other number: no norm, mean, maximum,
            sort or projection over a tensor or several, no random numbers, no blocks (as 8-bit states have);
            and that state is tensors of the parameter's shape and single numbers.
        options: for the class.

    Returns:
        The optimizer.

    Raises:
        Parallel3dError: no optimizer class, one of which nothing is known or said, one that the trial has
            found to work in neither way, or ``differentiable=True``.
    """
    _check(optimizer_class, matrix, elementwise, options)
    given = list(params.parameters() if isinstance(params, nn.Module) else params)
    for entry in given:
        # Read here and by the class: ``model.parameters()`` would be empty the second time.
        if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
            entry["params"] = list(entry["params"])
    if matrix is None:
        matrix = not elementwise and _needs_whole(optimizer_class)
    first = given[0] if given and isinstance(given[0], dict) else {}
    own = {k: v for k, v in first.items() if k not in ("params", "param_names")}
    if matrix:
        check_one_by_one(optimizer_class, options, own)
    elif not is_known_elementwise(optimizer_class):
        _check_said(optimizer_class, elementwise)
        check_elementwise(optimizer_class, options, own, _device(given))
    made: Any = _local_class(optimizer_class, matrix)
    return made(given, **options)


def _check(optimizer_class: Any, matrix: Any, elementwise: Any, options: dict[str, Any]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise Parallel3dError(
            f"optim.local was given {optimizer_class!r}; it needs a class of optimizers, such as "
            "torch.optim.AdamW, and makes the object itself: local(torch.optim.AdamW, model, lr=1e-3)"
        )
    for refused, why in _REFUSED.items():
        if issubclass(optimizer_class, getattr(torch.optim, refused)):
            raise Parallel3dError(
                f"optim.local: {optimizer_class.__name__} can't step on shards: {why}"
            )
    if options.get("differentiable"):
        raise Parallel3dError(
            "optim.local: differentiable=True differentiates the step, which on shards is outside of any "
            "graph; leave it out"
        )
    if matrix is not None and not isinstance(matrix, bool):
        raise Parallel3dError(f"matrix is {matrix!r}; it must be True, False or None")
    if not isinstance(elementwise, bool):
        raise Parallel3dError(f"elementwise is {elementwise!r}; it must be True or False")
    if matrix and elementwise:
        raise Parallel3dError(
            "matrix=True and elementwise=True: an elementwise class needs no whole parameters; give one"
        )


def _check_said(optimizer_class: type[Optimizer], elementwise: bool) -> None:
    """Raises if nobody has said that it is elementwise, which nothing else can show."""
    if elementwise:
        return
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    base = next((b for b in optimizer_class.__mro__[1:] if is_known_elementwise(b)), None)
    inherits = "" if base is None else f" (it is a subclass of {base.__name__}, which may do more)"
    raise Parallel3dError(
        f"optim.local: {name} is not known to be elementwise{inherits}; known are {', '.join(ELEMENTWISE)} "
        "of torch.optim. On shards it would be right only if what it does to a number depends on no other "
        "number: if so, give elementwise=True. If it treats parameters one by one, but each as a whole (by "
        "norms, projections, maxima), give matrix=True. If it looks at all parameters together, or if you "
        "don't know, use the class itself on the model's parameters, which are DTensors"
    )


def _needs_whole(optimizer_class: type[Optimizer]) -> bool:
    known = tuple(getattr(torch.optim, name) for name in _MATRIX if hasattr(torch.optim, name))
    return bool(getattr(optimizer_class, "whole_matrix", issubclass(optimizer_class, known)))


def _device(given: list[Any]) -> torch.device:
    """Where the first parameter is."""
    for entry in given:
        if isinstance(entry, dict):
            tensors = entry.get("params", ())
            return _device([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
        tensor = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


class LocalSteps:
    """Mixed into an elementwise optimizer class: its ``step`` sees pieces in place of parameters.

    Attributes:
        local_base: that class.
    """

    local_base: type[Optimizer]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, State]
    _local: LocalState | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the class's, on local tensors."""
        loss = _evaluated(closure)
        if self._local is None or not self._local.is_current(self.param_groups, self.state):
            self._local = LocalState(self.param_groups, self.state)
        with self._local.shown_to(self):
            step_of(self.local_base)(self)
        self._local.publish(self.state)
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_from, (self.local_base, False), self.__getstate__()


class LocalMatrixSteps:
    """Mixed into a class that needs whole parameters.

    Attributes:
        local_base: that class.
    """

    local_base: type[Optimizer]
    _matrices: MatrixSteps | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the class's, on whole parameters, some on each rank."""
        loss = _evaluated(closure)
        optimizer: Any = self
        if self._matrices is None:
            self._matrices = MatrixSteps()
        self._matrices.step(optimizer, step_of(self.local_base))
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_from, (self.local_base, True), self.__getstate__()


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    """Its backward must find the Parameters, so it runs before the step sees others."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


_classes: dict[tuple[type[Optimizer], bool], Any] = {}


def _local_class(base: type[Optimizer], matrix: bool) -> Any:
    """The subclass of ``base`` whose ``step`` is on local tensors; made once."""
    if (base, matrix) not in _classes:
        kind = LocalMatrixSteps if matrix else LocalSteps
        members = {"local_base": base, "__doc__": base.__doc__, "__module__": __name__}
        _classes[base, matrix] = type(f"Local{base.__name__}", (kind, base), members)
    return _classes[base, matrix]


def _made_from(base: type[Optimizer], matrix: bool) -> Any:
    """For copies and pickles, whose state is set next."""
    made = _local_class(base, matrix)
    return made.__new__(made)
