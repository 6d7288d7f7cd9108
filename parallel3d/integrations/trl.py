"""TRL's SFTTrainer for models that ``parallelize`` was applied to."""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import trl
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise ImportError("integrations.trl needs TRL; pip install trl") from error

from parallel3d.integrations.transformers import ParallelMixin


class SFTTrainer(ParallelMixin, trl.SFTTrainer):
    """TRL's SFTTrainer for a model that ``parallelize`` was applied to; see ``ParallelMixin``.

    TRL multiplies by ``lm_head.weight`` itself, in tiles, so that there are no whole logits. With tensor
    parallelism a rank has only a part of that weight: the head's own forward is called then, and the logits
    of a micro-batch are in memory, as with transformers' Trainer.
    """

    def _adapt_fused_head(self, module: nn.Module) -> None:
        _use_logits(module)


def _use_logits(module: Any) -> None:
    """Makes the module's forward with ``fused_lm_head=True`` compute whole logits, by its own head."""
    fused = module.forward  # without fused_lm_head it is the module's own

    @wraps(type(module).forward)  # TRL keeps the signature too, which generate reads
    def forward(
        module: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {
                "labels": labels,
                "shift_labels": shift_labels,
                "num_items_in_batch": num_items_in_batch,
            }
            options |= {name: value for name, value in given.items() if value is not None}
            return fused(*args, **options)
        outputs = fused(*args, **{**options, "use_cache": False})
        logits = outputs.logits
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        mask = shift_labels != -100
        log_probs = -F.cross_entropy(
            logits.flatten(0, 1), shift_labels.flatten(), reduction="none"
        ).view(mask.shape)
        with torch.no_grad():
            entropy = torch.distributions.Categorical(logits=logits).entropy() * mask
            is_top1 = (logits.argmax(-1) == shift_labels) & mask
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / count,
            log_probs=log_probs,
            entropy=entropy,
            is_top1=is_top1,
            label_mask=mask,
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    module.forward = MethodType(forward, module)
