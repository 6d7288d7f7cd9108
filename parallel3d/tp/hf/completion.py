"""Completion: a model's plan, made right where the forward's flow shows that it is not.

Two repairs are certain. A parameter without a rule that acts on each head, or on each feature, alike gets
its gradient summed; one that holds something for each head is split with the heads. Anything else in an
attention or MLP block is answered by leaving the block whole on every rank, which is always right.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.chosen import Rule
from parallel3d.tp.hf.code import OwnCode, plan_packages
from parallel3d.tp.hf.flow import Clash, Flow, Meeting, quoted, trace_flow
from parallel3d.tp.names import parse_style
from parallel3d.tp.patterns import matches, numberless, specificity
from parallel3d.tp.styles import Replicated, Style

__all__ = ["Call", "Rules", "complete"]

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
