"""Completion: a model's own plan, corrected where the flow of its forward shows that it is wrong.

Two corrections are certain. A parameter without a rule that acts alike on each head, or on each feature, gets
its gradient summed; one that holds something for each head is split with the heads. Any other error in an
attention or MLP block leaves the block whole on every rank, which is always right.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from parallel3d._torch.simulated import simulation_off
from parallel3d._trace.examples import Example, check_example, examples
from parallel3d._util.trees import map_tensors
from parallel3d.errors import PlanError
from parallel3d.tp.auto.flow import (
    Conflict,
    Flow,
    LocalUse,
    OwnCode,
    plan_packages,
    quoted,
    trace_flow,
)
from parallel3d.tp.auto.trace import common_path
from parallel3d.tp.resolve import PlanSource, Rule, matches, numberless, parse_style, specificity
from parallel3d.tp.styles import Replicated, Style

Rules = dict[str, Rule]
Call = Callable[[nn.Module], Any]
CallsOf = Callable[[nn.Module], Iterable[Call]]


def complete(
    model: nn.Module, rules: Rules, tp_size: int, calls: CallsOf
) -> tuple[Rules, dict[str, str], list[str]]:
    """Adds to ``rules`` what is missing and removes what can't be right. When no call works the rules are
    unchanged, and a note says why.

    Args:
        calls: returns, for a model, ways to run a copy of it on the meta device, of which one should work.

    Returns:
        The rules, the reason for each added one, and notes.

    Raises:
        PlanError: an error lies in no block that could be left whole, or in every layer's.
    """
    notes: list[str] = []
    rules = dict(rules)
    code = OwnCode(plan_packages(model))
    while True:
        styles = styles_of(model, rules)
        flow, failed = _trace(model, styles, calls, code)
        if flow is None:
            _check_taken_as_is(model, code, failed)
            return rules, {}, [*notes, f"the plan was taken as it is: {_NOT_RUN} ({failed})"]
        if failed:
            note = f"only the models inside {type(model).__name__} were looked at: {_NOT_RUN} ({failed})"
            notes += [note] if note not in notes else []
        # Rules that would sum gradients that are whole already.
        paths = [p for p in flow.whole - flow.local_uses.keys() if _is_summed(p, styles)]
        named = {name for path in paths for name in (path, path.rpartition(".")[0])}
        needless = [p for p in rules if any(matches(p, name) for name in named)]
        if needless:
            rules = {p: style for p, style in rules.items() if p not in needless}
            notes += [
                f"{p!r} is not needed: what it is for is used alike on every rank" for p in needless
            ]
            continue
        conflicts = _conflicts(model, styles, flow, tp_size)
        if not conflicts:
            added, why, more = _param_rules(model, rules, styles, flow, tp_size)
            return {**rules, **added}, why, [*notes, *more]
        # One block at a time: a part that is used wrongly in one causes conflicts in others.
        paths = list(conflicts[0].modules)
        around = common_path(paths) if len(paths) > 1 else paths[0].rpartition(".")[0]
        block = numberless(around)  # the smallest module around all of a conflict's
        dropped = [pattern for pattern in rules if _inside(model, pattern, block)]
        if not dropped:
            raise PlanError(f"the plan {type(model).__name__} brings is wrong: {conflicts[0].text}")
        rules = {p: style for p, style in rules.items() if p not in dropped}
        notes.append(
            f"{block!r} stays whole on every rank, its {len(dropped)} rules are left out: "
            f"{conflicts[0].text}"
        )
        if not any("*" in pattern for pattern in rules):
            raise PlanError(
                f"the plan {type(model).__name__} brings is wrong in every layer: {'; '.join(notes)}"
            )


_NOT_RUN = "the model can't be run on the meta device to look at it"


def _trace(
    model: nn.Module, styles: dict[str, Style], calls: CallsOf, code: OwnCode
) -> tuple[Flow | None, str]:
    """Returns the flow of the first call that works, and ``""``. Where the model can't be run, the models
    inside it that have a plan are run instead, and the second value is the error of the first call; the
    flow is None if one of these can't be run either."""
    trace = functools.partial(trace_flow, model, styles, code=code)
    flow, failed = _first(trace, calls(model), "")
    if flow is not None:
        return flow, ""
    parts = [_first(trace, calls(part), path)[0] for path, part in _models_inside(model)]
    flows = [flow for flow in parts if flow is not None]
    whole = functools.reduce(Flow.joined, flows) if flows and len(flows) == len(parts) else None
    return whole, failed


def _first(trace: Callable[..., Flow], calls: Iterable[Call], path: str) -> tuple[Flow | None, str]:
    failed = ""
    for call in calls:
        try:
            return trace(call=lambda twin, call=call: call(twin.get_submodule(path))), ""
        except Exception as error:  # any: it is the model's code
            failed = failed or f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None, failed


def _models_inside(model: nn.Module, path: str = "") -> Iterable[tuple[str, nn.Module]]:
    """Yields the outermost modules inside ``model`` that have a config with a plan."""
    for name, child in model.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if getattr(getattr(child, "config", None), "base_model_tp_plan", None):
            yield inner, child
        else:
            yield from _models_inside(child, inner)


def _check_taken_as_is(model: nn.Module, code: OwnCode, failed: str) -> None:
    """Raises if a plan that can't be checked is used with code that it wasn't written for."""
    own = [path for path, m in model.named_modules() if code.runs_in(m) or code.hooks_of(m)]
    if own:
        raise PlanError(
            f"{own[0] or type(model).__name__!r} runs code that the plan {type(model).__name__} brings was "
            f"not written for, and {_NOT_RUN} ({failed}); give tp_plan a dict, such as "
            "auto_plan(model, tp_size, example) with an example of the model's arguments"
        )


def styles_of(model: nn.Module, rules: Rules) -> dict[str, Style]:
    """Returns path of a module or a parameter -> the style of its most specific rule."""
    found: dict[str, Style] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in sorted(rules, key=specificity):  # the most specific last
        style = parse_style(rules[pattern])
        for name in [*modules, *params]:
            if matches(pattern, name):
                module = modules.get(name)
                found[name] = style if module is None else style.for_module(module)
    return found


# ---- conflicts ----


def _conflicts(
    model: nn.Module, styles: dict[str, Style], flow: Flow, tp_size: int
) -> list[Conflict]:
    conflicts, both = list(flow.conflicts), []
    for path, uses in flow.local_uses.items():
        owner = path.rpartition(".")[0]
        if _is_summed(path, styles):
            if path in flow.whole:
                text = f"{path!r} meets each rank's part, but is used alike on every rank too"
                both.append(Conflict(text, frozenset([owner])))
        elif path in flow.whole or _correction(model, path, uses, tp_size) is None:
            sources = frozenset[str]().union(*(use.sources for use in uses))
            of = quoted(sources)
            text = f"parameter {path!r} has no rule and meets each rank's part, of {of}"
            conflicts.append(Conflict(text, sources | {owner}))
    return conflicts + both


def _is_summed(path: str, styles: dict[str, Style]) -> bool:
    style = styles.get(path, styles.get(path.rpartition(".")[0]))
    return isinstance(style, Replicated) and style.tp_grad == "partial"


def _inside(model: nn.Module, pattern: str, block: str) -> bool:
    matched = (numberless(name) for name in _names(model) if matches(pattern, name))
    return bool(block) and any(f"{name}.".startswith(f"{block}.") for name in matched)


# ---- corrections ----


def _correction(model: nn.Module, path: str, uses: list[LocalUse], tp_size: int) -> str | None:
    """Returns the style that makes a parameter without a rule right, if one does."""
    shape = tuple(model.get_parameter(path).shape)
    wanted = {_correction_for(model, shape, use, tp_size) for use in uses}
    return wanted.pop() if len(wanted) == 1 else None


def _correction_for(
    model: nn.Module, shape: tuple[int, ...], use: LocalUse, tp_size: int
) -> str | None:
    dims = [i - len(use.shape) for i, size in enumerate(use.shape) if size != 1]
    if not dims:  # one number for everything
        return "replicated_with_grad_allreduce"
    if not use.apart or use.shape[-1] != use.local_shape[-1]:
        return None
    # With heads as a dim of their own, the last dim is that of one head, alike for each.
    if dims == [-1]:
        return "replicated_with_grad_allreduce"
    heads, size = use.shape[-2:]
    split = [getattr(model.get_submodule(s), "out_features", 0) for s in use.sources]
    own = shape == (heads, size) and dims == [-2, -1] and use.local_shape[-2] == heads
    if own and heads % tp_size == 0 and all(width == heads * size for width in split):
        return "colwise"  # it has a part for each head
    return None


def _param_rules(
    model: nn.Module, rules: Rules, styles: dict[str, Style], flow: Flow, tp_size: int
) -> tuple[Rules, dict[str, str], list[str]]:
    """Returns rules for the parameters that can be corrected, in all layers, their reasons and notes."""
    added: Rules = {}
    why: dict[str, str] = {}
    notes: list[str] = []
    corrections = {
        path: _correction(model, path, uses, tp_size)
        for path, uses in flow.local_uses.items()
        if not _is_summed(path, styles)
    }
    for path, style in corrections.items():
        assert style is not None
        owner = path.rpartition(".")[0]
        module = model.get_submodule(owner)
        alone = style != "colwise" and owner not in styles
        alone &= all(corrections.get(f"{owner}.{n}") == style for n in module._parameters)
        pattern = numberless(owner if alone else path)
        sources = frozenset(map(numberless, flow.local_uses[path][0].sources))
        reason = f"it acts on each rank's part, of {quoted(sources)}"
        if pattern not in {**rules, **added}:
            added[pattern], why[pattern] = style, f"added: {reason}"
            notes.append(f"{pattern!r} gets {style!r}: {reason}")
        outer = numberless(owner)
        if not alone and owner not in styles and outer not in {**rules, **added}:
            added[outer], why[outer] = "local_params", "added: for the rules of its parameters"
    return added, why, notes


# The plan of a Hugging Face model: merged as transformers merges it, without importing it.
#
# It is in ``_tp_plan`` of the model and of the models inside it, and in ``config.base_model_tp_plan`` of base
# models. transformers 5.23 merges these when a model is made; earlier releases merge fewer of them, so it is
# done here again, which changes nothing where it was done already.


def has_hf_plan(model: nn.Module) -> bool:
    """Whether the model, or a model inside it, has a plan."""
    return bool(merged_plan(model))


def merged_plan(model: nn.Module) -> dict[str, str]:
    """Returns the model's rules and those of the models inside it, with their paths in front; where two have
    the same pattern, the outer model's counts."""
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
    # Not by a __getattr__ that asks a module inside, as peft's models do.
    rules = inspect.getattr_static(owner, attribute, None)
    return dict(rules) if isinstance(rules, Mapping) else {}


def hf_plan(model: nn.Module, tp_size: int, example: Any = None) -> PlanSource:
    """Returns the model's plan, without the rules that match nothing here, completed. Raises PlanError if
    none of its rules matches, or it is wrong in a way that can't be corrected."""
    own = merged_plan(model)
    names = _names(model)
    rules: Rules = _without_overlaps(own, names)
    if not rules:
        raise PlanError(
            f"the plan {type(model).__name__} brings names {', '.join(map(repr, own))}, "
            "of which this model has nothing; give tp_plan a dict"
        )
    left_out = [pattern for pattern in own if not any(matches(pattern, n) for n in names)]
    listed = f"rules of the model's plan that match nothing here: {', '.join(left_out)}"
    with simulation_off():  # otherwise the inputs would be simulated ranks' tensors
        calls = functools.partial(_calls, model, example)
        rules, why, notes = complete(model, rules, tp_size, calls)
    notes = [listed, *notes] if left_out else notes
    return PlanSource(rules, why, tuple(notes), "the model's plan")


def _names(model: nn.Module) -> list[str]:
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return modules + [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _without_overlaps(plan: Mapping[str, str], names: list[str]) -> Rules:
    """Returns ``plan`` with one rule for each name: as in transformers the one whose ``*`` are all numbers,
    or else the more specific; the other is written out for the names it keeps."""
    kept: dict[str, list[str]] = {pattern: [] for pattern in plan}
    for name in names:
        matching = [pattern for pattern in plan if matches(pattern, name)]
        if matching:
            exact = numberless(name)
            kept[max(matching, key=lambda p: (p == exact, specificity(p)))].append(name)
    rules: Rules = {}
    for pattern, own in kept.items():
        if len(own) == sum(matches(pattern, name) for name in names):
            rules |= {pattern: plan[pattern]} if own else {}
        else:
            rules |= dict.fromkeys(own, plan[pattern])
    return rules


def _calls(whole: nn.Module, example: Any, model: nn.Module) -> Iterator[Call]:
    """Yields ways to run a meta copy of ``model``, which is ``whole`` or a model inside it, the most likely
    first: with the user's example, with token ids alone, or with inputs guessed from the class."""
    if example is not None and model is whole:
        yield _call(check_example(example))
    ids = torch.ones(1, 4, dtype=torch.long)
    yield _call(((), {"input_ids": ids, "use_cache": False}))
    guessed: list[Example] = []
    with torch.random.fork_rng(devices=[]), suppress(Exception):  # it runs the model's code
        guessed += examples(model)
    yield from map(_call, guessed)


def _call(example: Example) -> Call:
    args, kwargs = map_tensors(lambda t: t.to("meta"), example)

    def call(twin: nn.Module) -> Any:
        # Attention in torch's functions: other kernels don't run on meta.
        for module in twin.modules():
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_attn_implementation"):
                config._attn_implementation = "eager"
        return twin(*args, **kwargs)

    return call
