"""Kinds of activation checkpointing: what backward computes again, and what comes from the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Recomputation:
    """One kind of activation checkpointing.

    Attributes:
        what: a description to be shown.
        argument: the value of ``parallelize(activation_checkpointing=)``; None: only other frameworks have
            it.
        blocks: fraction of the blocks whose whole forward is repeated.
        collectives: fraction of the forward's collectives over tp and cp that is repeated.
        elementwise: whether the elementwise kernels of each block are repeated.
        matmuls: every second matmul of a block is repeated, from this index on; None: no single matmul is.
    """

    name: str
    what: str
    argument: bool | str | None = None
    blocks: float = 0.0
    collectives: float = 0.0
    elementwise: bool = False
    matmuls: int | None = None

    def again(self, forward: float, matmuls: Sequence[float], elementwise: float) -> float:
        """Returns the seconds or FLOPs of a block's forward that its backward repeats.

        Args:
            forward: seconds or FLOPs of the block's forward.
            matmuls: the same of each of its matmuls.
            elementwise: the same of all its elementwise kernels.
        """
        found = self.blocks * forward
        if self.elementwise:
            found += elementwise
        if self.matmuls is not None:
            found += sum(matmuls[self.matmuls :: 2])
        return found

    @property
    def formula(self) -> str:
        """The formula of ``again``, as text."""
        parts = {
            f"{self.blocks:g} * forward kernels": self.blocks > 0,
            "every second matmul forward": self.matmuls is not None,
            "elementwise forward": self.elementwise,
        }
        return " + ".join(part for part, counts in parts.items() if counts) or "0"


_KINDS = (
    Recomputation("none", "all activations are kept", False),
    Recomputation(
        "selective",
        "results of matmuls, attention and the collectives of tp and cp are kept; the rest is computed again",
        "selective",
        elementwise=True,
    ),
    Recomputation("offload", "what blocks keep waits in the host's memory", "offload"),
    Recomputation("full", "each block is computed again from its input", True, 1.0, 1.0),
    Recomputation(
        "full_offload", "as full, and the blocks' inputs wait in the host's memory", None, 1.0, 1.0
    ),
    Recomputation(
        "selective_op",
        "results of attention and of every second matmul are kept; the rest is computed again (torchtitan)",
        collectives=0.5,
        elementwise=True,
        matmuls=1,
    ),
    Recomputation("selective_layer", "every second block is computed again", None, 0.5, 0.5),
)
KINDS = {kind.name: kind for kind in _KINDS}
OWN = tuple(kind.name for kind in _KINDS if kind.argument is not None)
"""Names of the kinds that ``parallelize`` has."""
