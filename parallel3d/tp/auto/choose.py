"""The plan that ``"auto"`` stands for: the model's own, completed, or a derived one."""

from typing import Any

from torch import nn

from parallel3d.tp.auto.complete import has_hf_plan, hf_plan
from parallel3d.tp.auto.derive import derive_plan
from parallel3d.tp.lora import without_adapters
from parallel3d.tp.resolve import PlanSource, Rule


def auto_plan(model: nn.Module, tp_size: int, example: Any = None) -> dict[str, Rule]:
    """Returns the plan that ``tp_plan="auto"`` stands for, as a dict to look at, edit and pass instead.

    A Hugging Face model (transformers 5) has its own plan. Its rules that match nothing in this model are
    left out, and rules that it lacks are added. Each kind of block is proven on random numbers, whatever
    code runs in it; one in which a rank would compute something else stays whole. For a model without a
    plan one is derived, see ``parallel3d.tp.auto.derive.derive_plan``.

    Args:
        model: a plain model, possibly on the meta device.
        tp_size: the number of ranks of the ``tp`` axis.
        example: ``(args, kwargs)`` of a small batch for the model's forward. By default a Hugging Face
            model's ``dummy_inputs``, or a guess from the first module with weights.

    Raises:
        PlanError: the model has no plan and none can be derived, or its plan would be wrong here.
    """
    return dict(choose(model, tp_size, example).rules)


def choose(model: nn.Module, tp_size: int, example: Any = None) -> PlanSource:
    """Returns the plan as :func:`auto_plan`, with the reason for each rule."""
    model = without_adapters(model)  # whose styles follow from those of their layers
    if has_hf_plan(model):
        return hf_plan(model, tp_size, example)
    return derive_plan(model, tp_size, example)
