"""The plan a Hugging Face model brings: merged as transformers merges it, without importing it.

Read by duck typing: ``_tp_plan`` of the model and of the models inside it, and
``config.base_model_tp_plan`` of base models. transformers 5.23 merges these when a model is made;
earlier releases merge fewer of them, so the merge is done here again, which changes nothing where it
was done already.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.chosen import ChosenPlan
from parallel3d.tp.completion import complete
from parallel3d.tp.patterns import matches
from parallel3d.tp.styles import Style

__all__ = ["has_hf_plan", "hf_plan", "merged_plan"]


def has_hf_plan(model: nn.Module) -> bool:
    """Whether the model, or a model inside it, brings a plan."""
    return bool(merged_plan(model))


def merged_plan(model: nn.Module) -> dict[str, str]:
    """The model's rules and those of the models inside it, with their paths before them.

    The rules the model itself has come first and hold where two say different things.
    """
    plan = _rules_of(model, "_tp_plan")
    config = getattr(model, "config", None)
    if getattr(model, "base_model", None) is model:
        plan = {**_rules_of(config, "base_model_tp_plan"), **plan}
    # transformers >= 5.2x splits the vocabulary of a model with a plan that doesn't say otherwise.
    if plan and isinstance(getattr(model, "embed_tokens", None), nn.Embedding):
        plan = {"embed_tokens": "embedding_rowwise", **plan}
    for name, child in model.named_children():
        inner = {f"{name}.{pattern}": style for pattern, style in merged_plan(child).items()}
        plan = {**inner, **plan}
    return plan


def _rules_of(owner: Any, attribute: str) -> dict[str, str]:
    found = getattr(owner, attribute, None)
    return dict(found) if isinstance(found, Mapping) else {}


def hf_plan(model: nn.Module, tp_size: int) -> ChosenPlan:
    """The model's plan, without the rules that match nothing here, completed.

    Raises:
        PlanError: no rule of it matches, or it is wrong in a way that can't be repaired.
    """
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    names += [n for n, _ in model.named_parameters(remove_duplicate=False)]
    given = merged_plan(model)
    rules: dict[str, str | Style] = {
        pattern: style
        for pattern, style in given.items()
        if any(matches(pattern, name) for name in names)
    }
    if not rules:
        raise PlanError(
            f"the plan {type(model).__name__} brings names {', '.join(map(repr, given))}, "
            "of which this model has nothing; give tp_plan a dict"
        )
    left_out = [pattern for pattern in given if pattern not in rules]
    notes = []
    if left_out:
        notes.append(f"rules of the model's plan that match nothing here: {', '.join(left_out)}")
    rules, why, more = complete(model, rules, tp_size, _run)
    return ChosenPlan(rules, why, (*notes, *more), "the model's plan", specific_first=True)


def _run(model: nn.Module) -> Any:
    """Runs a meta copy as transformers' models are run, without a cache."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # the kernels of others don't run on meta
    ids = torch.ones(1, 4, dtype=torch.long, device="meta")
    return model(input_ids=ids, use_cache=False)
