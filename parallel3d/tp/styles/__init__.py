"""The styles, one concept a file."""

from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.embedding import VocabParallel
from parallel3d.tp.styles.linear import Colwise, Rowwise
from parallel3d.tp.styles.prepare import PrepareInput
from parallel3d.tp.styles.replicated import Replicated
from parallel3d.tp.styles.sequence import SequenceParallel
from parallel3d.tp.styles.sizes import LocalSizes

__all__ = [
    "Colwise",
    "LocalSizes",
    "PrepareInput",
    "Replicated",
    "Rowwise",
    "SequenceParallel",
    "Style",
    "VocabParallel",
]
