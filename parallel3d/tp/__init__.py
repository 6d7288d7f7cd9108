"""Tensor parallelism on local tensors (``docs/tensor_parallel.md``).

- Plans: ``auto_plan`` finds one, ``resolve_plan`` checks one against a model, ``ResolvedPlan`` prints and
  applies it. ``STYLE_NAMES`` are the names its rules may have.
- Styles: ``Colwise``, ``Rowwise``, ``VocabParallel``, ``SequenceParallel`` and the others, children of
  ``Style``.
- Losses of split logits: ``vocab_parallel_cross_entropy``, ``linear_cross_entropy``; ``VocabLogits`` is what
  a model gives under ``parallelize(loss_parallel=...)``.
- ``check_same_batch`` compares what the ranks of a tp group read.
- Under it all: ``TpAxis`` and the autograd collectives, for modules with a forward of their own.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.tp.auto.complete import auto_plan as auto_plan
    from parallel3d.tp.collectives import TpAxis as TpAxis
    from parallel3d.tp.collectives import copy_to_tp as copy_to_tp
    from parallel3d.tp.collectives import gather_from_tp as gather_from_tp
    from parallel3d.tp.collectives import gather_sequence as gather_sequence
    from parallel3d.tp.collectives import reduce_from_tp as reduce_from_tp
    from parallel3d.tp.collectives import reduce_scatter_sequence as reduce_scatter_sequence
    from parallel3d.tp.collectives import scatter_sequence as scatter_sequence
    from parallel3d.tp.collectives import split_to_tp as split_to_tp
    from parallel3d.tp.local_attributes import PlannedAttribute as PlannedAttribute
    from parallel3d.tp.local_attributes import local_attributes as local_attributes
    from parallel3d.tp.plan import PlannedModule as PlannedModule
    from parallel3d.tp.plan import PlannedParam as PlannedParam
    from parallel3d.tp.plan import ResolvedPlan as ResolvedPlan
    from parallel3d.tp.plan import resolve_plan as resolve_plan
    from parallel3d.tp.resolve import STYLE_NAMES as STYLE_NAMES
    from parallel3d.tp.resolve import parse_style as parse_style
    from parallel3d.tp.same_batch import check_same_batch as check_same_batch
    from parallel3d.tp.styles import Colwise as Colwise
    from parallel3d.tp.styles import Experts as Experts
    from parallel3d.tp.styles import HeadArguments as HeadArguments
    from parallel3d.tp.styles import IdentityExpert as IdentityExpert
    from parallel3d.tp.styles import LocalParams as LocalParams
    from parallel3d.tp.styles import LocalSizes as LocalSizes
    from parallel3d.tp.styles import PrepareInput as PrepareInput
    from parallel3d.tp.styles import PrepareInputOutput as PrepareInputOutput
    from parallel3d.tp.styles import PrepareOutput as PrepareOutput
    from parallel3d.tp.styles import Replicated as Replicated
    from parallel3d.tp.styles import RopeOutput as RopeOutput
    from parallel3d.tp.styles import Rowwise as Rowwise
    from parallel3d.tp.styles import SequenceParallel as SequenceParallel
    from parallel3d.tp.styles import SplitHeads as SplitHeads
    from parallel3d.tp.styles import Style as Style
    from parallel3d.tp.styles import VocabParallel as VocabParallel
    from parallel3d.tp.torch_styles import TorchStyle as TorchStyle
    from parallel3d.tp.vocab_parallel.head import LogitsHead as LogitsHead
    from parallel3d.tp.vocab_parallel.head import linear_cross_entropy as linear_cross_entropy
    from parallel3d.tp.vocab_parallel.head import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    )
    from parallel3d.tp.vocab_parallel.vocab_logits import VocabLogits as VocabLogits
else:
    export_lazily(
        __name__,
        {
            ".auto.complete": "auto_plan",
            ".collectives": (
                "TpAxis copy_to_tp gather_from_tp gather_sequence reduce_from_tp "
                "reduce_scatter_sequence scatter_sequence split_to_tp"
            ),
            ".local_attributes": "PlannedAttribute local_attributes",
            ".plan": "PlannedModule PlannedParam ResolvedPlan resolve_plan",
            ".resolve": "STYLE_NAMES parse_style",
            ".same_batch": "check_same_batch",
            ".styles": (
                "Colwise Experts HeadArguments IdentityExpert LocalParams LocalSizes PrepareInput "
                "PrepareInputOutput PrepareOutput Replicated RopeOutput Rowwise SequenceParallel "
                "SplitHeads Style VocabParallel"
            ),
            ".torch_styles": "TorchStyle",
            ".vocab_parallel.head": "LogitsHead linear_cross_entropy vocab_parallel_cross_entropy",
            ".vocab_parallel.vocab_logits": "VocabLogits",
        },
    )
