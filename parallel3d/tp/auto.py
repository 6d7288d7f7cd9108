"""tp_plan="auto": the plan a model brings, or one derived from it."""

from typing import Any

from torch import nn

from parallel3d.tp.chosen import ChosenPlan, Rule

__all__ = ["auto_plan", "choose"]


def auto_plan(model: nn.Module, tp_size: int, example: Any = None) -> dict[str, Rule]:
    """The plan that ``tp_plan="auto"`` stands for, as a dict to look at, edit and give instead.

    A Hugging Face model (transformers 5) brings its plan. Rules of it that match nothing in this
    model are left out, and rules it lacks to be right are added where they are certain. It is taken for
    the family's code only: a block in which other code (a subclass's, a patch, a hook, a registered
    attention function) handles what ranks have parts of stays whole. For a model
    without a plan one is derived, see ``parallel3d.tp.derive.derive_plan``.

    Args:
        model: a plain model, possibly on the meta device.
        tp_size: ranks of the ``tp`` axis.
        example: ``(args, kwargs)`` of a small batch for the model's forward, where no input can be
            guessed.

    Raises:
        PlanError: the model has no plan and none can be derived, or its plan would be wrong here.
    """
    return dict(choose(model, tp_size, example).rules)


def choose(model: nn.Module, tp_size: int, example: Any = None) -> ChosenPlan:
    """As :func:`auto_plan`, with why each rule is there."""
    # Here, so that importing parallel3d doesn't wait for what few programs use.
    from parallel3d.tp.derive import derive_plan
    from parallel3d.tp.hf.merge import has_hf_plan, hf_plan

    if has_hf_plan(model):
        return hf_plan(model, tp_size, example)
    return derive_plan(model, tp_size, example)
