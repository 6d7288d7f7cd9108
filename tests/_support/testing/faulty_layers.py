"""Layers written by hand that are wrong: each as people write it."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from _support.testing.verify_models import Attention, ColumnLinear, Loss, RowEmbedding, RowLinear


class NoReduction(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ReducedTwice(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return _SumBothWays.apply(super().forward(x), self.tp.get_group())


class BiasOnEveryRank(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return _SumBothWays.apply(F.linear(x, self.weight, self.bias), self.tp.get_group())


class SummedAgainInBackward(RowLinear):
    """As torch.distributed.nn.functional.all_reduce does it."""

    def forward(self, x: Tensor) -> Tensor:
        return _SumBothWays.apply(F.linear(x, self.weight), self.tp.get_group())


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class NoSumOfInputGradient(ColumnLinear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class NoMask(RowEmbedding):
    def mask(self, found: Tensor, elsewhere: Tensor) -> Tensor:
        return found


class WholeHeadCount(Attention):
    """Divides its features by the number of heads that the plain model has."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (4, -1)) for w in (self.wq, self.wk, self.wv))
        return self.attend(q, k, v)


class PlainHeadCount(Attention):
    """The same where the heads are not split."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        return self.attend(q, k, v)


class QueryAndKeySwapped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        return self.attend(self.rope(k), self.rope(q), v)


class QueriesByRows(Attention):
    """Each tp rank attends with its part of the sequence as queries; all of them begin at position 0."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        rank, rows = self.tp.get_local_rank(), x.shape[1] // self.tp.size()
        q, k = self.rope(q.narrow(1, rank * rows, rows)), self.rope(k)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        before = rank * rows
        y = F.pad(y, (0, 0, before, x.shape[1] - rows - before))
        return self.wo(_SumBothWays.apply(y, self.tp.get_group()))


class ResidualAgain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + x + self.drop(self.mlp(self.norm2(x)))


class SummedLoss(Loss):
    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return _SumBothWays.apply(super().forward(logits, ids), self.tp.get_group())


class LowPrecision(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)
        return _SumBothWays.apply(y, self.tp.get_group())
