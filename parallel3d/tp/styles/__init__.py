"""The styles, one concept a file."""

from parallel3d.tp.styles.arguments import HeadArguments
from parallel3d.tp.styles.attention import NoFastPath, SplitHeads
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.embedding import VocabParallel
from parallel3d.tp.styles.experts import Experts, IdentityExpert
from parallel3d.tp.styles.linear import Colwise, Rowwise
from parallel3d.tp.styles.local_params import LocalParams
from parallel3d.tp.styles.output import PrepareOutput, RopeOutput
from parallel3d.tp.styles.prepare import PrepareInput, PrepareInputOutput
from parallel3d.tp.styles.replicated import Replicated
from parallel3d.tp.styles.sequence import SequenceParallel
from parallel3d.tp.styles.sizes import LocalSizes

__all__ = [
    "Colwise",
    "Experts",
    "HeadArguments",
    "IdentityExpert",
    "LocalParams",
    "LocalSizes",
    "NoFastPath",
    "PrepareInput",
    "PrepareInputOutput",
    "PrepareOutput",
    "Replicated",
    "RopeOutput",
    "Rowwise",
    "SequenceParallel",
    "SplitHeads",
    "Style",
    "VocabParallel",
]
