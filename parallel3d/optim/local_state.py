"""LocalState: what an optimizer on local tensors steps on, beside what the user sees of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from parallel3d._compat import foreach_copy_
from parallel3d._compat_foreach import foreach_zero_
from parallel3d.optim.pieces import Apart, Piece, State
from parallel3d.optim.run_piece import RunPiece, pieces_of
from parallel3d.optim.singles import Singles
from parallel3d.optim.snapshot import Snapshot

__all__ = ["LocalState"]


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
