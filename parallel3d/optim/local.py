"""optim.local: an optimizer that steps on plain local tensors and shows DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.kernels import foreach_copy_, foreach_zero_, local_tensors, specs_of
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util.arguments import as_count
from parallel3d.errors import Parallel3dError
from parallel3d.optim.blocks import BlockSteps, restore_dtypes
from parallel3d.optim.known import (
    BLOCKWISE,
    ELEMENTWISE,
    MATRIX,
    REFUSED,
    base_among,
    is_known_blockwise,
    is_known_elementwise,
    step_of,
)
from parallel3d.optim.matrix import MatrixSteps, can_be_shared
from parallel3d.optim.pieces import (
    ParamPiece,
    Piece,
    RunPiece,
    SeparateGradients,
    State,
    is_elementwise,
    pieces_of,
)

_grad_of, _dtype_of = attrgetter("grad"), attrgetter("dtype")


class Snapshot:
    """The objects in an optimizer's state at one time, to find out later whether any was replaced. It
    compares identities only, by C loops, because there may be hundreds of entries."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self._keys, self._entries = list(state), list(state.values())
        self._dicts = [entry for entry in self._entries if isinstance(entry, dict)]
        self._names, self._values = self._read()

    def _read(self) -> tuple[list[Any], list[Any]]:
        names = [*map(len, self._dicts), *chain.from_iterable(self._dicts)]
        return names, list(chain.from_iterable(map(dict.values, self._dicts)))

    def matches(self, state: dict[Any, Any]) -> bool:
        """Whether ``state`` still has the same keys and the same objects, in the same order."""
        if len(state) != len(self._keys) or not all(map(is_, state, self._keys)):
            return False
        if not all(map(is_, state.values(), self._entries)):
            return False
        names, values = self._read()
        return names == self._names and all(map(is_, values, self._values))


class SingleParams:
    """Those of ``pieces`` that are one DTensor parameter each. There may be hundreds, so C loops handle them
    together; Python code runs only for what has changed since the last step."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        single = (piece for piece in pieces if isinstance(piece, ParamPiece))
        self.pieces = [piece for piece in single if isinstance(piece.params[0], DTensor)]
        self._params = [piece.params[0] for piece in self.pieces]
        self._locals = local_tensors(self._params)
        self._tensors = [piece.tensor for piece in self.pieces]
        # The last gradients, which were reduced: their specs, which there were, and the dtypes of the pieces.
        self._specs: list[Any] = []
        self._present: list[int] = []
        self._dtypes: list[torch.dtype] = []

    @property
    def is_current(self) -> bool:
        """Whether the pieces' tensors still are the parameters' local tensors."""
        return all(map(is_, local_tensors(self._params), self._locals))

    def set_gradients(self) -> None:
        """Sets ``.grad`` of the pieces' tensors; StateError if a gradient is not reduced yet."""
        grads = list(map(_grad_of, self._params))
        local_grads = self._checked_before(grads)
        if local_grads is None:
            local_grads = [piece.gradient() for piece in self.pieces]
            self._specs = _specs(grads)
            self._present = [i for i, grad in enumerate(grads) if grad is not None]
            self._dtypes = [self._tensors[i].dtype for i in self._present]
        for tensor, grad in zip(self._tensors, local_grads, strict=True):
            tensor.grad = grad

    def _checked_before(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Returns the local gradients if the last step has checked such specs and dtypes, else None."""
        if len(self._specs) != len(grads) or not all(map(is_, _specs(grads), self._specs)):
            return None
        present: Any = [grads[i] for i in self._present]
        locals_ = local_tensors(present)
        if not all(map(is_, map(_dtype_of, locals_), self._dtypes)):
            return None
        by_index = dict(zip(self._present, locals_, strict=True))
        return [by_index.get(i) for i in range(len(grads))]


def _specs(grads: list[torch.Tensor | None]) -> list[Any]:
    """Returns the DTensor specs of ``grads``, or [] if one is not a DTensor."""
    try:
        return specs_of(grads)
    except AttributeError:
        return []


class LocalState:
    """The pieces (see ``pieces.py``) of an optimizer's groups, and the state that the optimizer has for them.

    Attributes:
        params: the parameters, by group.
        by_group: the pieces, by group.
        state: the state as the optimizer sees it in its step: piece's tensor -> entries.
        copies: (piece's tensor, key) -> (single number, such as a step count, expanded to the piece's
            parameters; a copy for each parameter, to be saved and loaded; the copies' version).
    """

    def __init__(self, groups: list[dict[str, Any]], shown: dict[Any, State]) -> None:
        """Makes the pieces for ``groups``, and takes over ``shown``, the state by parameter."""
        self.params = [list(group["params"]) for group in groups]
        self.state: defaultdict[Any, State] = defaultdict(dict)
        self.copies: dict[Any, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._last: dict[nn.Parameter, State] = {}  # the state of each piece as it was published
        self._stepped: Snapshot | None = None  # of ``state`` as it was published
        self._shown: Snapshot | None = None  # of ``shown`` then
        self.by_group = [
            [piece for whole in pieces_of(params) for piece in self._with_state(whole, shown)]
            for params in self.params
        ]
        params = set(chain(*self.params))
        self.state.update({k: v for k, v in shown.items() if k not in params})
        self._index()
        self.publish(shown)

    def _index(self) -> None:
        """Sorts the pieces into the lists that each step needs."""
        pieces = list(chain.from_iterable(self.by_group))
        self.singles = SingleParams(pieces)
        self.runs = [piece for piece in pieces if isinstance(piece, RunPiece)]
        self.tensors = [[piece.tensor for piece in group] for group in self.by_group]
        self.own = [piece.tensor for piece in pieces if piece.tensor is not piece.params[0]]
        self.padding = list(chain.from_iterable(piece.padding for piece in pieces))

    def _with_state(self, piece: Piece, shown: dict[Any, State]) -> list[Piece]:
        """Takes over the states of the piece's parameters. Returns [piece], or smaller pieces if these states
        can't be joined."""
        states = [shown.get(param, {}) for param in piece.params]
        state = piece.join_states(states)
        if state is None:  # its parameters have been stepped on differently
            assert isinstance(piece, RunPiece)
            return [part for p in piece.split(states) for part in self._with_state(p, shown)]
        if state:
            self.state[piece.tensor] = state
        return [piece]

    def _split(self, piece: RunPiece, shown: dict[Any, State]) -> list[Piece]:
        """Replaces a piece whose parameters' gradients are not one tensor by smaller ones, and returns these;
        the state keeps its memory."""
        state = self.state.pop(piece.tensor, {})
        self._last.pop(piece.tensor, None)
        for key in state:
            self.copies.pop((piece.tensor, key), None)
        parts = piece.split()
        for part in parts:
            if not isinstance(part, RunPiece):
                self._with_state(part, shown)
            elif state:
                self.state[part.tensor] = part.state_from(piece, state)
        return parts

    def is_current(self, groups: list[dict[str, Any]], shown: dict[Any, State]) -> bool:
        """Whether ``groups`` and ``shown``, the state by parameter, are as the last step left them."""
        given = [group["params"] for group in groups]
        return (
            list(map(len, given)) == list(map(len, self.params))
            and all(map(is_, chain(*given), chain(*self.params)))
            and self.singles.is_current
            and all(run.is_current for run in self.runs)
            and all(copies._version == version for _, copies, version in self.copies.values())
            and self._matches(shown)
        )

    def _matches(self, shown: dict[Any, State]) -> bool:
        if self._shown is not None and self._shown.matches(shown):
            return True
        self._shown = None
        return self._own_shown.matches(self._own(shown))

    def _own(self, shown: dict[Any, State]) -> dict[Any, State]:
        """Returns the state of this object's parameters; others may be those of other buckets."""
        return {param: shown[param] for param in chain(*self.params) if shown.get(param)}

    def _set_gradients(self, shown: dict[Any, State]) -> None:
        """Sets ``.grad`` of the pieces' tensors; splits pieces whose gradients are not one tensor."""
        replaced: dict[int, list[Piece]] = {}
        for run in self.runs:
            try:
                run.tensor.grad = run.gradient()
            except SeparateGradients:
                replaced[id(run)] = self._split(run, shown)
        if replaced:
            for pieces in self.by_group:
                pieces[:] = [part for p in pieces for part in replaced.get(id(p), (p,))]
            self._index()
            self._stepped = None
            for part in chain.from_iterable(replaced.values()):
                if isinstance(part, RunPiece):
                    part.tensor.grad = part.gradient()
        self.singles.set_gradients()

    @contextmanager
    def shown_to(self, optimizer: Any) -> Iterator[None]:
        """A context in which ``optimizer`` has the pieces' tensors, gradients and state."""
        groups, shown = optimizer.param_groups, optimizer.state
        try:
            with torch.no_grad():
                self._set_gradients(shown)
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
        """Puts new entries of the pieces' state into ``shown``, as DTensors; old ones share its memory."""
        if self._stepped is None or not self._stepped.matches(self.state):
            pieces = {piece.tensor: piece for piece in chain.from_iterable(self.by_group)}
            for key, state in self.state.items():
                if key in pieces:
                    self._publish(pieces[key], state, shown)
                else:
                    shown[key] = state
            self._stepped, self._own_shown = Snapshot(self.state), Snapshot(self._own(shown))
            self._shown = None
        if self._shown is None:
            self._shown = Snapshot(shown)
        if self.copies:
            expanded, copies, _ = map(list, zip(*self.copies.values(), strict=True))
            with torch.no_grad():
                foreach_copy_(copies, expanded)
            for place, (number, copy, _) in self.copies.items():
                self.copies[place] = number, copy, copy._version

    def _publish(self, piece: Piece, state: State, shown: dict[Any, State]) -> None:
        last = self._last.get(piece.tensor)
        known = {k for k, v in state.items() if last is not None and k in last and last[k] is v}
        if last is not None and len(known) == len(state) == len(last):
            return
        entries: list[State] = [{} for _ in piece.params]
        for key, value in state.items():
            by_param = [value] * len(entries)
            if key not in known:
                _check_state(piece, key, value)
            if key in known:
                by_param = [shown[param][key] for param in piece.params]
            elif is_elementwise(piece, value):
                by_param = piece.split_state(value)
            elif isinstance(value, torch.Tensor) and len(entries) > 1:
                with torch.no_grad():
                    expanded = value.detach().expand(len(entries))
                    copies = expanded.clone()
                self.copies[piece.tensor, key] = expanded, copies, copies._version
                by_param = list(copies.unbind())
            for entry, part in zip(entries, by_param, strict=True):
                entry[key] = part
        shown.update(zip(piece.params, entries, strict=True))
        self._last[piece.tensor] = dict(state)


def _check_state(piece: Piece, key: str, value: Any) -> None:
    """Raises Parallel3dError for an entry of a state that an elementwise optimizer can't have: not a single
    number, nor a tensor of the piece's shape."""
    kind = f"keeps a {type(value).__name__} in the entry {key!r} of a parameter's state"
    if can_be_shared(value, piece.tensor):
        if not isinstance(value, torch.Tensor) or not value.dim():
            return
        pairs = zip(inner_tensors(value), inner_tensors(piece.tensor), strict=False)
        if all(a.shape == b.shape for a, b in pairs):
            return
        kind += f", of shape {tuple(value.shape)} for a part of {tuple(piece.tensor.shape)}"
    raise Parallel3dError(
        f"optim.local: the optimizer {kind}, which can't be cut by element; an elementwise class has tensors "
        "of the parameter's shape and single numbers there. Give matrix=True if it treats parameters one by "
        "one, each as a whole, or use the class itself on the model's DTensors"
    )


def local(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Any],
    *,
    matrix: bool | None = None,
    elementwise: bool = False,
    **options: Any,
) -> Optimizer:
    """Makes an ``optimizer_class`` that steps on this rank's plain tensors instead of DTensors::

        optimizer = p3d.optim.local(torch.optim.AdamW, model, lr=1e-3)

    The result is an instance of a subclass. Its ``param_groups`` have the DTensor parameters, its ``state``
    and ``state_dict()`` DTensors that are placed as the parameters. So schedulers and
    ``torch.distributed.checkpoint`` with its ``get_optimizer_state_dict`` take it like any other optimizer,
    and what was saved loads on other meshes.

    An elementwise class steps on the whole flat buffer of a bucket where one group has all parameters of it:
    a few tensors per unit. Its state is then flat as well, and the tensors in ``state`` are views of it.
    torch's ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop and SGD are known to be
    elementwise (these classes, not subclasses of them). For any other class pass ``elementwise=True``.

    A class that is not elementwise (Muon, Adafactor, or one with ``matrix=True``) gets whole parameters, as
    on the plain model: the parameters of one shape are distributed over the ranks that share them by
    all-to-alls, and each rank steps on its own. State shaped as the parameter stays sharded between steps;
    other tensors (Adafactor's factors) are kept by every rank. All ranks must have gradients of the same
    parameters. Use a class that looks at all parameters together directly on the model's DTensors. To torch's
    Muon a parameter of three dims is a stack of matrices, as experts are: each is stepped on by itself.

    torchao's AdamW8bit, AdamW4bit, AdamWFp8 and their Adam (these classes, not subclasses of them) get this
    rank's shards, with quantized state where the whole parameter has it on one process, in the same blocks.
    Give ``fully_shard`` or ``Sharding`` the class's ``block_size`` as ``block=``: parameters whose blocks are
    divided between ranks are gathered for each step.

    Your assertions are not proven: with a wrong one the training silently computes other numbers. Only
    contradictions that show in the state raise, at the first step. `docs/optimizers.md` lists 125 classes.

    Args:
        params: a module, or what the class itself takes: tensors, (name, tensor) pairs, groups as dicts.
        matrix: True asserts that a step on a parameter depends on this parameter, its gradient and its
            state, all whole, and on no other parameter, random numbers or a closure's loss; and that the
            state of two parameters of one shape has the same shapes. None: the class's attribute
            ``whole_matrix``, and True for torch's Muon and Adafactor.
        elementwise: True asserts that the step on an element depends on this element, its gradient, its
            state, the group's options and the step count, and on no other element: no norm, mean, maximum,
            sort or projection over a tensor or several, no random numbers, no blocks (as 8-bit states have,
            but see above);
            that it takes no loss from a closure; and that the state consists of tensors of the
            parameter's shape and single numbers.
        options: further arguments of the class.

    Returns:
        The optimizer.

    Raises:
        Parallel3dError: ``optimizer_class`` is no optimizer class, or one of which nothing is known or
            asserted, or ``elementwise=True`` was said of torch's Muon or Adafactor; or
            ``differentiable=True``. At the first step: its state is not as was asserted.
    """
    _check(optimizer_class, matrix, elementwise, options)
    groups = list(params.parameters() if isinstance(params, nn.Module) else params)
    for entry in groups:
        # Read here and by the class: a generator such as ``model.parameters()`` would be empty then.
        if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
            entry["params"] = list(entry["params"])
    if matrix is None:
        known = base_among(MATRIX, optimizer_class) is not None
        matrix = not elementwise and bool(getattr(optimizer_class, "whole_matrix", known))
    blockwise = is_known_blockwise(optimizer_class)
    if not (matrix or elementwise or blockwise or is_known_elementwise(optimizer_class)):
        _raise_unknown(optimizer_class)
    kind = LocalMatrixSteps if matrix else LocalBlockSteps if blockwise else LocalSteps
    made = _local_class(optimizer_class, kind)  # type: ignore[arg-type]
    if matrix and base_among(MATRIX, optimizer_class) == "Muon":
        return _of_matrices(made, groups, options)
    if blockwise and "block_size" in options:
        as_count("block_size", options["block_size"], 1)  # torchao divides by it
    optimizer = made(groups, **options)
    if blockwise:
        for group in optimizer.param_groups:
            optimizer.blocks.add_states(group)
    return optimizer


def _of_matrices(made: Any, groups: list[Any], options: dict[str, Any]) -> Optimizer:
    """Makes an optimizer of the class ``made``, a local subclass of torch's Muon, whose ``__init__`` refuses
    parameters of three dims: here they are stacks of matrices."""
    by_group = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    optimizer = made([{"params": []}] if groups else [], **options)
    optimizer.param_groups.clear()
    for group in by_group:
        optimizer.add_param_group(group)
    odd = next((p for g in by_group for p in g["params"] if p.dim() not in (2, 3)), None)
    if odd is not None:
        raise Parallel3dError(
            f"optim.local: Muon steps on matrices, and on stacks of them as experts have (three dims, each "
            f"matrix by itself), but a parameter has the shape {tuple(odd.shape)}; give it to another "
            "optimizer, such as AdamW"
        )
    return optimizer


def _check(optimizer_class: Any, matrix: Any, elementwise: Any, options: dict[str, Any]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise Parallel3dError(
            f"optim.local was given {optimizer_class!r}; it needs a class of optimizers, as in "
            "local(torch.optim.AdamW, model, lr=1e-3)"
        )
    name, refused = optimizer_class.__name__, base_among(REFUSED, optimizer_class)
    if refused is not None:
        raise Parallel3dError(f"optim.local: {name} can't step on shards: {REFUSED[refused]}")
    if is_known_blockwise(optimizer_class) and (matrix or elementwise):
        raise Parallel3dError(
            f"optim.local was given {'matrix' if matrix else 'elementwise'}=True, but the state of {name} is "
            "quantized in blocks, which it knows; leave it out"
        )
    whole = base_among(MATRIX, optimizer_class)
    if elementwise is True and whole is not None:
        raise Parallel3dError(
            f"optim.local was given elementwise=True, but {name} is not elementwise: its step takes "
            f"{MATRIX[whole]}; leave it out, or give matrix=True"
        )
    if options.get("differentiable"):
        raise Parallel3dError(
            "optim.local was given differentiable=True, but no graph goes through a step on "
            "shards; leave it out"
        )
    if matrix is not None and not isinstance(matrix, bool):
        raise Parallel3dError(f"matrix is {matrix!r}; it must be True, False or None")
    if not isinstance(elementwise, bool):
        raise Parallel3dError(f"elementwise is {elementwise!r}; it must be True or False")
    if matrix and elementwise:
        raise Parallel3dError(
            "optim.local was given matrix=True and elementwise=True; an elementwise class needs no whole "
            "parameters: give one of them"
        )


def _raise_unknown(optimizer_class: type[Optimizer]) -> None:
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    base = next((b for b in optimizer_class.__mro__[1:] if is_known_elementwise(b)), None)
    inherits = "" if base is None else f" (it is a subclass of {base.__name__}, which may do more)"
    raise Parallel3dError(
        f"optim.local: {name} is not known to be elementwise{inherits}; known are {', '.join(ELEMENTWISE)} "
        f"of torch.optim, and {', '.join(BLOCKWISE)} of torchao.optim. "
        "Give elementwise=True if its step on an element depends on no other element, or "
        "matrix=True if it treats parameters one by one, each as a whole (norms, projections, maxima); else "
        "use the class itself on the model's DTensors"
    )


class LocalSteps:
    """Base class that ``optim.local`` adds to an optimizer class: its ``step`` runs on plain tensors, the
    pieces.

    Attributes:
        local_base: the optimizer class that it was added to.
    """

    local_base: type[Optimizer]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, State]
    _local: LocalState | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the optimizer class's own step on plain tensors; returns the closure's loss."""
        loss = None
        if closure is not None:  # before the step: its backward needs the parameters
            with torch.enable_grad():
                loss = closure()
        self._step_locally(step_of(self.local_base))
        return loss

    def _step_locally(self, step: Callable[[Any], Any]) -> None:
        if self._local is None or not self._local.is_current(self.param_groups, self.state):
            self._local = LocalState(self.param_groups, self.state)
        with self._local.shown_to(self):
            step(self)
        self._local.publish(self.state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_local, (self.local_base, type(self).__mro__[1]), self.__getstate__()


class LocalMatrixSteps(LocalSteps):
    """A LocalSteps for classes that need whole parameters: each rank steps on some, see ``MatrixSteps``."""

    _matrices: MatrixSteps | None = None

    def _step_locally(self, step: Callable[[Any], Any]) -> None:
        optimizer: Any = self
        if self._matrices is None:
            base = base_among(MATRIX, self.local_base)
            self._matrices = MatrixSteps(known=base is not None, stacked=base == "Muon")
        self._matrices.step(optimizer, step)


class LocalBlockSteps(LocalSteps):
    """A LocalSteps for torchao's classes with quantized state: each parameter is stepped on by itself, see
    ``BlockSteps``. States are made at the beginning, so that a checkpoint can be read into them."""

    _blocks: BlockSteps | None = None

    @property
    def blocks(self) -> BlockSteps:
        if self._blocks is None:
            self._blocks = BlockSteps(self)
        return self._blocks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        if hasattr(self, "block_size"):  # not yet in ``__init__``
            self.blocks.add_states(self.param_groups[-1])

    def _step_locally(self, step: Callable[[Any], Any]) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.blocks.step(group, param, step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``Optimizer.load_state_dict``, but quantized state is not cast to the parameters' dtype."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        restore_dtypes(self, state_dict)  # type: ignore[arg-type]


@cache
def _local_class(base: type[Optimizer], kind: type[LocalSteps]) -> Any:
    """Returns the class that derives from ``kind`` and ``base`` and steps on local tensors; made once."""
    members = {"local_base": base, "__doc__": base.__doc__, "__module__": __name__}
    return type(f"Local{base.__name__}", (kind, base), members)


def _new_local(base: type[Optimizer], kind: type[LocalSteps]) -> Any:
    """Returns an instance without calling ``__init__``, for copies and pickles."""
    cls = _local_class(base, kind)  # type: ignore[arg-type]
    return cls.__new__(cls)
