"""The plan a Hugging Face model brings: merged as transformers merges it, without importing it.

Read by duck typing: ``_tp_plan`` of the model and of the models inside it, and
``config.base_model_tp_plan`` of base models. transformers 5.23 merges these when a model is made;
earlier releases merge fewer of them, so the merge is done here again, which changes nothing where it
was done already.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from parallel3d._compat_simulated import simulation_off
from parallel3d._tree import map_tensors
from parallel3d.errors import PlanError
from parallel3d.tp.chosen import ChosenPlan
from parallel3d.tp.derive.inputs import Example, check_example, examples
from parallel3d.tp.hf.completion import Call, Rules, complete
from parallel3d.tp.patterns import matches, numberless, specificity

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


def hf_plan(model: nn.Module, tp_size: int, example: Any = None) -> ChosenPlan:
    """The model's plan, without the rules that match nothing here, completed.

    ``example``: ``(args, kwargs)`` to look at the model with, where ``input_ids`` won't do.

    Raises:
        PlanError: no rule of it matches, or it is wrong in a way that can't be repaired.
    """
    given = merged_plan(model)
    rules: Rules = _without_overlaps(given, _names(model))
    if not rules:
        raise PlanError(
            f"the plan {type(model).__name__} brings names {', '.join(map(repr, given))}, "
            "of which this model has nothing; give tp_plan a dict"
        )
    notes = []
    left_out = [
        pattern for pattern in given if not any(matches(pattern, name) for name in _names(model))
    ]
    if left_out:
        notes.append(f"rules of the model's plan that match nothing here: {', '.join(left_out)}")
    with simulation_off():  # or what it is looked at with would be simulated ranks' tensors
        calls = functools.partial(_calls, model, example)
        rules, why, more = complete(model, rules, tp_size, calls)
    return ChosenPlan(rules, why, (*notes, *more), "the model's plan")


def _names(model: nn.Module) -> list[str]:
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return modules + [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _without_overlaps(given: Mapping[str, str], names: list[str]) -> Rules:
    """``given`` with one rule for each name: transformers takes the one whose ``*`` are all numbers.

    Where two rules match, the more specific stays; the other is written out for the names it keeps.
    """
    found: dict[str, list[str]] = {pattern: [] for pattern in given}
    for name in names:
        mine = [pattern for pattern in given if matches(pattern, name)]
        if mine:
            exact = numberless(name)
            found[max(mine, key=lambda p: (p == exact, specificity(p)))].append(name)
    rules: Rules = {}
    for pattern, kept in found.items():
        if len(kept) == sum(matches(pattern, name) for name in names):
            rules |= {pattern: given[pattern]} if kept else {}
        else:
            rules |= dict.fromkeys(kept, given[pattern])
    return rules


def _calls(whole: nn.Module, example: Any, model: nn.Module) -> Iterator[Call]:
    """Ways to run a meta copy of ``model``, which is ``whole`` or a model inside it, the likelier first: the
    example that was given, token ids alone, or what the class says it takes."""
    found: list[Example] = []
    if example is not None and model is whole:
        found.append(check_example(example))
    ids = torch.ones(1, 4, dtype=torch.long)
    found.append(((), {"input_ids": ids, "use_cache": False}))
    yield from map(_call, found)
    found = []
    with (
        torch.random.fork_rng(devices=[]),
        suppress(Exception),
    ):  # the model's code says what it takes
        found += examples(model)
    yield from map(_call, found)


def _call(example: Example) -> Call:
    args, kwargs = map_tensors(lambda t: t.to("meta"), example)
    return lambda twin: _eager(twin)(*args, **kwargs)


def _eager(model: nn.Module) -> nn.Module:
    """``model`` with attention in torch's functions; the kernels of others don't run on meta."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"
    return model
