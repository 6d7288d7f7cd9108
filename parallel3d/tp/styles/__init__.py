"""The styles, one concept a file."""

from parallel3d.tp.styles.attention import HeadArguments, NoFastPath, SplitHeads
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.experts import Experts, IdentityExpert
from parallel3d.tp.styles.linear import Colwise, Rowwise, VocabParallel
from parallel3d.tp.styles.prepare import (
    LocalParams,
    LocalSizes,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    Replicated,
    RopeOutput,
    SequenceParallel,
)
