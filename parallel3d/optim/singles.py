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
        self._specs: list[
            Any
        ] = []  # of the last gradients, which were reduced and of the right dtype

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
        there = [grad for grad in grads if grad is not None]
        locals_ = local_tensors(there)
        wanted = [t for t, grad in zip(self._tensors, grads, strict=True) if grad is not None]
        if not all(map(is_, map(_dtype_of, locals_), map(_dtype_of, wanted))):
            return None
        if len(there) == len(grads):
            return list(locals_)
        following = iter(locals_)
        return [None if grad is None else next(following) for grad in grads]

    def _remember(self, grads: list[torch.Tensor | None]) -> None:
        self._specs = _specs(grads)


def _specs(grads: list[torch.Tensor | None]) -> list[Any]:
    """Nothing if one is no DTensor."""
    try:
        return specs_of(grads)
    except AttributeError:
        return []
