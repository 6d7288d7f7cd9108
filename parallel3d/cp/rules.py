"""What one call of attention asks for: which keys a query may attend to, and how scores are changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parallel3d._torch.simulated import value_here
from parallel3d.cp.sequence import CpAxis, Sequence

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), index tensors that broadcast -> bool, as transformers' mask functions are."""


@dataclass(frozen=True, eq=False)
class Rules:
    """One call's masks and changes of scores, on positions of the whole sequence.

    Attributes:
        sequence, axis: how the sequences lie on the ranks, and on which.
        left: how many keys before itself a query sees, at most; None: all.
        right: how many after itself; 0: causal; None: all.
        scale: factor of the scores.
        documents: (B, padded) integers; a query sees keys of its own number.
        key_mask: (B, padded) bool: keys that may be attended to.
        mask_function: asked with positions below ``length``.
        head: the number that the first query head has for ``mask_function``.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        dropout: the probability that a weight becomes 0.
        masks: those that were made and apply to other blocks too, by (distance of queries from keys, queries,
            keys).
    """

    sequence: Sequence
    axis: CpAxis
    scale: float
    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None
    key_mask: Tensor | None = None
    mask_function: MaskFunction | None = None
    head: int = 0
    softcap: float | None = None
    dropout: float = 0.0
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Positions that are no padding."""
        return self.sequence.length

    @property
    def causal(self) -> bool:
        """Whether a query sees no key after itself."""
        return self.right == 0

    @property
    def dense(self) -> bool:
        """Whether the positions of queries and keys don't tell which keys count."""
        return not (self.documents is None and self.key_mask is None and self.mask_function is None)

    @property
    def may_hide_all(self) -> bool:
        """Whether there may be a query that sees no key, of all or of a block's."""
        return self.dense or self.left is not None or self.right not in (None, 0)

    @property
    def fusible(self) -> bool:
        """Whether fused kernels can compute it."""
        return self.softcap is None and not self.dropout

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns ``documents`` and ``key_mask``, which differ by simulated rank."""
        return self.documents, self.key_mask

    def of(self, documents: Tensor | None, key_mask: Tensor | None, head: int = 0) -> Rules:
        """Returns a rank's rules: with its tensors, for queries from its first head."""
        head += self.head
        return replace(self, documents=documents, key_mask=key_mask, head=head)

    def mask(self, q_at: int, q_rows: int, k_at: int, k_rows: int, q: Tensor) -> Tensor:
        """Returns a bool mask, (B or 1, heads or 1, q_rows, k_rows): True where the query attends to the key.

        Args:
            q_at, q_rows: position of the first query, and number of the queries, which are consecutive.
            k_at, k_rows: the same of the keys.
            q: (B, heads, ...), gives the batch, the heads and the device.
        """
        if self.dense:
            return self._mask(q_at, q_rows, k_at, k_rows, q)
        where = q_at - k_at, q_rows, k_rows
        if where not in self.masks:
            self.masks[where] = self._mask(q_at, q_rows, k_at, k_rows, q)
        return self.masks[where]

    def _mask(self, q_at: int, q_rows: int, k_at: int, k_rows: int, q: Tensor) -> Tensor:
        queries = torch.arange(q_at, q_at + q_rows, device=q.device)[:, None]
        keys = torch.arange(k_at, k_at + k_rows, device=q.device)[None, :]
        mask = keys >= 0  # those of padding are in no block, or come after every query
        if self.left is not None:
            mask = mask & (keys >= queries - self.left)
        if self.right is not None:
            mask = mask & (keys <= queries + self.right)
        mask = mask.expand(q_rows, k_rows)[None, None]
        if self.documents is not None:
            own = self.documents[:, q_at : q_at + q_rows, None]
            mask = mask & (own == self.documents[:, None, k_at : k_at + k_rows])[:, None]
        if self.key_mask is not None:
            mask = mask & self.key_mask[:, None, None, k_at : k_at + k_rows]
        if self.mask_function is not None:
            batch = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
            heads = torch.arange(self.head, self.head + q.shape[1], device=q.device)
            last = self.length - 1
            allowed = self.mask_function(
                batch, heads[:, None, None], queries.clamp(max=last), keys.clamp(max=last)
            )
            mask = mask & value_here(allowed)
        return mask
