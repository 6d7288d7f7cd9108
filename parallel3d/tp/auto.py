"""tp_plan="auto": the plan a model brings, or one derived from it."""

from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.chosen import ChosenPlan, Rule
from parallel3d.tp.hf import has_hf_plan, hf_plan

__all__ = ["auto_plan", "choose"]


def auto_plan(model: nn.Module, tp_size: int) -> dict[str, Rule]:
    """The plan that ``tp_plan="auto"`` stands for, as a dict to look at, edit and give instead.

    A Hugging Face model (transformers 5) brings its plan. Rules of it that match nothing in this
    model are left out, and rules it lacks to be right are added where they are certain.

    Args:
        model: a plain model, possibly on the meta device.
        tp_size: ranks of the ``tp`` axis.

    Raises:
        PlanError: the model has no plan and none can be derived, or its plan would be wrong here.
    """
    return dict(choose(model, tp_size).rules)


def choose(model: nn.Module, tp_size: int) -> ChosenPlan:
    """As :func:`auto_plan`, with why each rule is there."""
    if has_hf_plan(model):
        return hf_plan(model, tp_size)
    raise PlanError(
        f"{type(model).__name__} brings no tensor-parallel plan and none can be derived from it; "
        'give tp_plan a dict such as {"layers.*.wq": "colwise", "layers.*.wo": "rowwise"}'
    )
