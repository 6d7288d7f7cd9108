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
    from parallel3d.tp.auto.derive import auto_plan
    from parallel3d.tp.collectives import (
        TpAxis,
        copy_to_tp,
        gather_from_tp,
        gather_sequence,
        reduce_from_tp,
        reduce_scatter_sequence,
        scatter_sequence,
        split_to_tp,
    )
    from parallel3d.tp.local_attributes import PlannedAttribute, local_attributes
    from parallel3d.tp.plan import PlannedModule, PlannedParam, ResolvedPlan, resolve_plan
    from parallel3d.tp.resolve import STYLE_NAMES, parse_style
    from parallel3d.tp.same_batch import check_same_batch
    from parallel3d.tp.styles import (
        Colwise,
        Experts,
        HeadArguments,
        IdentityExpert,
        LocalParams,
        LocalSizes,
        PrepareInput,
        PrepareInputOutput,
        PrepareOutput,
        Replicated,
        RopeOutput,
        Rowwise,
        SequenceParallel,
        SplitHeads,
        Style,
        VocabParallel,
    )
    from parallel3d.tp.torch_styles import TorchStyle
    from parallel3d.tp.vocab_parallel.head import (
        LogitsHead,
        linear_cross_entropy,
        vocab_parallel_cross_entropy,
    )
    from parallel3d.tp.vocab_parallel.vocab_logits import VocabLogits

_EXPORTS = {
    "tp.auto.derive": "auto_plan",
    "tp.collectives": "TpAxis copy_to_tp gather_from_tp gather_sequence reduce_from_tp "
    "reduce_scatter_sequence scatter_sequence split_to_tp",
    "tp.local_attributes": "PlannedAttribute local_attributes",
    "tp.plan": "PlannedModule PlannedParam ResolvedPlan resolve_plan",
    "tp.resolve": "STYLE_NAMES parse_style",
    "tp.same_batch": "check_same_batch",
    "tp.styles": "Colwise Experts HeadArguments IdentityExpert LocalParams LocalSizes "
    "PrepareInput PrepareInputOutput PrepareOutput Replicated RopeOutput Rowwise "
    "SequenceParallel SplitHeads Style VocabParallel",
    "tp.torch_styles": "TorchStyle",
    "tp.vocab_parallel.head": "LogitsHead linear_cross_entropy vocab_parallel_cross_entropy",
    "tp.vocab_parallel.vocab_logits": "VocabLogits",
}
__all__ = [name for names in _EXPORTS.values() for name in names.split()]

export_lazily(__name__, _EXPORTS)
