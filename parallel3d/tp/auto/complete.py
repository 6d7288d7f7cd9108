"""Completion: a model's plan, made right where the forward's flow shows that it is not.

Two repairs are certain. A parameter without a rule that acts on each head, or on each feature, alike gets
its gradient summed; one that holds something for each head is split with the heads. Anything else in an
attention or MLP block is answered by leaving the block whole on every rank, which is always right.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from parallel3d._torch.simulated import simulation_off
from parallel3d._util.trees import map_tensors
from parallel3d.errors import PlanError
from parallel3d.tp.auto.flow import Clash, Flow, Meeting, OwnCode, plan_packages, quoted, trace_flow
from parallel3d.tp.auto.trace import Example, check_example, examples
from parallel3d.tp.resolve import ChosenPlan, Rule, matches, numberless, parse_style, specificity
from parallel3d.tp.styles import Replicated, Style

Rules = dict[str, Rule]
Call = Callable[[nn.Module], Any]


def complete(
    model: nn.Module,
    rules: Rules,
    tp_size: int,
    calls: Callable[[nn.Module], Iterable[Call]],
) -> tuple[Rules, dict[str, str], list[str]]:
    """``rules`` with what is missing and without what can't be right.

    Args:
        rules: pattern -> style name.
        calls: of the model: ways to run a copy of it on the meta device, of which one should work.

    Returns:
        The rules, why each added one is there, and notes. When no call works the rules are as given, and a
        note says why they were not looked at.

    Raises:
        PlanError: something that is wrong lies in no block that could be left whole, or in every layer's.
    """
    why: dict[str, str] = {}
    notes: list[str] = []
    rules = dict(rules)
    code = OwnCode(plan_packages(model))
    while True:
        styles = styles_of(model, rules)
        flow, failed = _look(model, styles, calls, code)
        if flow is None:
            _check_taken_as_is(model, code, failed)
            return rules, why, [*notes, f"the plan was taken as it is: {_NOT_RUN} ({failed})"]
        if failed:
            said = f"only the models inside {type(model).__name__} were looked at: {_NOT_RUN} ({failed})"
            notes += [said] if said not in notes else []
        summed = _summed_for_nothing(rules, styles, flow)
        if summed:
            rules = {p: style for p, style in rules.items() if p not in summed}
            notes += [
                f"{p!r} is not needed: what it is for is used alike on every rank" for p in summed
            ]
            continue
        clashes = _clashes(model, styles, flow, tp_size)
        if not clashes:
            return _with_params(model, rules, styles, why, notes, flow, tp_size)
        # One block at a time: a part that goes astray is seen wherever it comes to.
        block = _block(clashes[0])
        dropped = [pattern for pattern in rules if _inside(model, pattern, block)]
        if not dropped:
            raise PlanError(f"the plan {type(model).__name__} brings is wrong: {clashes[0].text}")
        rules = {p: style for p, style in rules.items() if p not in dropped}
        notes.append(
            f"{block!r} stays whole on every rank, its {len(dropped)} rules are left out: "
            f"{clashes[0].text}"
        )
        if not any("*" in pattern for pattern in rules):
            raise PlanError(
                f"the plan {type(model).__name__} brings is wrong in every layer: {'; '.join(notes)}"
            )


_NOT_RUN = "the model can't be run on the meta device to look at it"


def _look(
    model: nn.Module,
    styles: dict[str, Style],
    calls: Callable[[nn.Module], Iterable[Call]],
    code: OwnCode,
) -> tuple[Flow | None, str]:
    """The flow of the first call that works, or what the first one that doesn't says.

    Where the model itself can't be run, those inside it that bring a plan are, one by one.
    """
    trace = functools.partial(trace_flow, model, styles, code=code)
    flow, failed = _first(trace, calls(model), "")
    if flow is not None:
        return flow, ""
    parts = [_first(trace, calls(part), path)[0] for path, part in _models_inside(model)]
    for part in parts:
        if part is None:
            return None, failed
        flow = part if flow is None else flow.joined(part)
    return flow, failed


def _first(trace: Callable[..., Flow], calls: Iterable[Call], path: str) -> tuple[Flow | None, str]:
    failed = ""
    for call in calls:
        try:
            return trace(call=lambda twin, call=call: call(twin.get_submodule(path))), ""
        except Exception as error:  # anything at all: it is the model's code
            failed = failed or f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None, failed


def _models_inside(model: nn.Module, path: str = "") -> Iterable[tuple[str, nn.Module]]:
    """The outermost modules inside ``model`` that have a config with a plan."""
    for name, child in model.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if getattr(getattr(child, "config", None), "base_model_tp_plan", None):
            yield inner, child
        else:
            yield from _models_inside(child, inner)


def _check_taken_as_is(model: nn.Module, code: OwnCode, failed: str) -> None:
    """A plan may be taken on trust only with the code that it was written for."""
    own = [path for path, m in model.named_modules() if code.runs_in(m) or code.hooks_of(m)]
    if own:
        raise PlanError(
            f"{own[0] or type(model).__name__!r} runs code that the plan {type(model).__name__} brings was "
            f"not written for, and {_NOT_RUN} ({failed}); give tp_plan a dict, such as "
            "auto_plan(model, tp_size, example) with an example of the model's arguments"
        )


def styles_of(model: nn.Module, rules: Rules) -> dict[str, Style]:
    """Path of a module or a parameter -> the style that holds for it."""
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


# ---- what can't be repaired ----


def _clashes(model: nn.Module, styles: dict[str, Style], flow: Flow, tp_size: int) -> list[Clash]:
    found = list(flow.clashes)
    for path, meetings in flow.met.items():
        if _is_summed(path, styles):
            continue
        if path in flow.whole or _repair(model, path, meetings, tp_size) is None:
            sources = frozenset[str]().union(*(m.sources for m in meetings))
            text = (
                f"parameter {path!r} has no rule and meets each rank's part, of {quoted(sources)}"
            )
            found.append(Clash(text, sources | {path.rpartition(".")[0]}))
    for path in flow.whole & flow.met.keys():
        if _is_summed(path, styles):
            text = f"{path!r} meets each rank's part, but is used alike on every rank too"
            found.append(Clash(text, frozenset([path.rpartition(".")[0]])))
    return found


def _summed_for_nothing(rules: Rules, styles: dict[str, Style], flow: Flow) -> list[str]:
    """Rules that would sum gradients that are whole already."""
    paths = [p for p in flow.whole - flow.met.keys() if _is_summed(p, styles)]
    named = {name for path in paths for name in (path, path.rpartition(".")[0])}
    return [pattern for pattern in rules if any(matches(pattern, name) for name in named)]


def _is_summed(path: str, styles: dict[str, Style]) -> bool:
    style = styles.get(path, styles.get(path.rpartition(".")[0]))
    return isinstance(style, Replicated) and style.tp_grad == "partial"


def _block(clash: Clash) -> str:
    """The pattern of the smallest module around everything the clash is about; ``""``: the whole model."""
    paths = [path.split(".") for path in clash.modules]
    if len(paths) == 1:
        paths = [paths[0][:-1]]
    common = [column[0] for column in itertools.takewhile(_is_one, zip(*paths, strict=False))]
    return numberless(".".join(common))


def _is_one(column: tuple[str, ...]) -> bool:
    return len(set(column)) == 1


def _inside(model: nn.Module, pattern: str, block: str) -> bool:
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    names += [n for n, _ in model.named_parameters(remove_duplicate=False)]
    found = {numberless(name) for name in names if matches(pattern, name)}
    return bool(block) and any(n == block or n.startswith(f"{block}.") for n in found)


# ---- what can ----


def _repair(model: nn.Module, path: str, meetings: list[Meeting], tp_size: int) -> str | None:
    """The style that makes a parameter without a rule right, if one does."""
    shape = tuple(model.get_parameter(path).shape)
    wanted = {_repair_once(model, shape, met, tp_size) for met in meetings}
    return wanted.pop() if len(wanted) == 1 else None


def _repair_once(
    model: nn.Module, shape: tuple[int, ...], met: Meeting, tp_size: int
) -> str | None:
    dims = [i - len(met.shape) for i, size in enumerate(met.shape) if size != 1]
    if not dims:  # one number for everything
        return "replicated_with_grad_allreduce"
    if not met.apart or met.shape[-1] != met.local_shape[-1]:
        return None
    # Of a tensor with its heads apart the last dim is one head's, and the same of each.
    if dims == [-1]:
        return "replicated_with_grad_allreduce"
    heads, size = met.shape[-2:]
    split = [getattr(model.get_submodule(s), "out_features", 0) for s in met.sources]
    own = shape == (heads, size) and dims == [-2, -1] and met.local_shape[-2] == heads
    if own and heads % tp_size == 0 and all(width == heads * size for width in split):
        return "colwise"  # something for each head
    return None


def _with_params(
    model: nn.Module,
    rules: Rules,
    styles: dict[str, Style],
    why: dict[str, str],
    notes: list[str],
    flow: Flow,
    tp_size: int,
) -> tuple[Rules, dict[str, str], list[str]]:
    """Adds the rules of parameters that can be repaired, each for all layers at once."""
    todo: dict[str, tuple[str, Meeting]] = {}
    for path, meetings in flow.met.items():
        if not _is_summed(path, styles):
            style = _repair(model, path, meetings, tp_size)
            assert style is not None
            todo[path] = (style, meetings[0])
    for path, (style, met) in todo.items():
        owner = path.rpartition(".")[0]
        module = model.get_submodule(owner)
        alone = style != "colwise" and owner not in styles
        alone &= all(todo.get(f"{owner}.{n}", "")[:1] == (style,) for n in module._parameters)
        pattern = numberless(owner if alone else path)
        reason = f"added: it acts on each rank's part, of {quoted(frozenset(map(numberless, met.sources)))}"
        if pattern not in rules:
            rules[pattern], why[pattern] = style, reason
            notes.append(f"{pattern!r} gets {style!r}: {reason.removeprefix('added: ')}")
        if not alone and owner not in styles and numberless(owner) not in rules:
            rules[numberless(owner)] = "local_params"
            why[numberless(owner)] = "added: for the rules of its parameters"
    return rules, why, notes


# The plan a Hugging Face model brings: merged as transformers merges it, without importing it.
#
# Read by duck typing: ``_tp_plan`` of the model and of the models inside it, and
# ``config.base_model_tp_plan`` of base models. transformers 5.23 merges these when a model is
# made; earlier releases merge fewer of them, so the merge is done here again, which changes
# nothing where it was done already.


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
