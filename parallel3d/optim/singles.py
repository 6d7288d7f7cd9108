"""Singles: the parameters that are stepped on one by one, looked at all at once."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat_foreach import local_tensors, specs_of
from parallel3d.optim.pieces import ParamPiece, Piece

__all__ = ["Singles"]

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
