"""Gathers whole tensors from their parts on the ranks of cp and tp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d.cp.batch import Batch, join
from parallel3d.cp.sequence import CpAxis


class Incomparable(Exception):
    """Raised for a tensor whose parts on ranks can't be made a whole; the message says why."""


class Whole:
    """Gathers tensors of one step on ``device``, over cp and tp, if these axes have several ranks.

    ``batch`` says which parts of the sequences the ranks of cp have; ``tokens`` are the numbers of tokens
    (samples x length) of the step's inputs with several samples.
    """

    def __init__(
        self,
        cp: DeviceMesh | None,
        tp: DeviceMesh | None,
        batch: Batch | None,
        device: torch.device,
        tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.sequence = None if batch is None else batch.sequence
        self.cp = None if cp is None or self.sequence is None else CpAxis(cp)
        self.tp, self.device, self.tokens = tp, device, tokens

    def __call__(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """Returns the whole tensor, of ``shape``, of which ``tensor`` is this rank's part or a copy.

        Raises:
            Incomparable: the shape of ``tensor`` is neither ``shape`` nor that of a part along one dim.
        """
        tensor = tensor.to(self.device)
        if tensor.shape == shape:
            return tensor if shape else self._mean(tensor)
        if tensor.dim() == len(shape):
            dims = [d for d, size in enumerate(shape) if tensor.shape[d] != size]
            whole = self._joined(tensor, dims[0], shape[dims[0]]) if len(dims) == 1 else tensor
            if whole.shape == shape:
                return whole
        raise Incomparable(
            f"it is {tuple(tensor.shape)} here, and {tuple(shape)} in the plain model"
        )

    def _joined(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        sequence = self.sequence
        part = None if self.cp is None or sequence is None else (sequence.rows, sequence.length)
        if part is not None and dim == 0 and tensor.shape[0] % part[0] == 0:
            samples = tensor.shape[0] // part[0]
            if samples > 1 and samples * part[1] == length:  # tokens, sample by sample
                by_sample = tensor.unflatten(0, (samples, part[0]))
                return self.of_input(by_sample, 1).flatten(0, 1)
        if self.tp is not None and dim == 0 and tensor.dim() == 2 and length in self.tokens:
            raise Incomparable("its tokens may lie sample by sample on each rank of tp, or not")
        if self.tp is not None and (tensor.shape[dim], length) != part:
            tensor = self._over_tp(tensor, dim)
        return self.of_input(tensor, dim) if (tensor.shape[dim], length) == part else tensor

    def of_input(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Returns the whole of a model's input that is cut over cp along ``dim``; None: it is not cut."""
        tensor = tensor.to(self.device)
        if dim is None or self.cp is None or self.sequence is None:
            return tensor
        return join(tensor, dim, self.sequence, self.cp)

    def gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """Returns the plain model's gradient, of ``shape``; ``grad``: that of this rank's part or copy."""
        whole = self(grad, shape)
        if self.cp is None:
            return whole
        if whole.shape != grad.shape:
            return whole / self.cp.size
        return whole if grad.dim() == 0 else self._mean(whole)

    def _mean(self, tensor: Tensor) -> Tensor:
        """Returns the mean over the ranks of cp, which have different values."""
        if self.cp is None or not tensor.is_floating_point():
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.cp.group)
        return total / self.cp.size

    def _over_tp(self, tensor: Tensor, dim: int) -> Tensor:
        assert self.tp is not None
        group, n = self.tp.get_group(), self.tp.size()
        sizes = torch.zeros(n, dtype=torch.int64, device=tensor.device)
        sizes[self.tp.get_local_rank()] = tensor.shape[dim]
        dist.all_reduce(sizes, group=group)
        rows = tensor.movedim(dim, 0)
        padded = rows.new_zeros((int(sizes.max()), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in range(n)]
        dist.all_gather(parts, padded, group=group)
        kept = [part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]
        return torch.cat(kept).movedim(0, dim)

    def random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return states
