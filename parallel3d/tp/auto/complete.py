"""The plan that ``"auto"`` stands for: the model's own, completed, or a derived one.

Completion corrects a model's own plan where a run of the model shows that it is wrong.

The model runs once, without weights, which shows the operations on the outputs of split layers. The code
between them is compared with the plain model's, as for a derived plan (``prove.py``), once for blocks that
are alike. Two corrections are certain: a parameter without a rule whose gradient is a partial sum on each
rank gets it summed; one with values for each head is split with the heads. A block with any other error is
left whole (computed in full on every rank), which is always right.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from parallel3d._trace.copies import NotCopied
from parallel3d.errors import PlanError
from parallel3d.tp.auto.check import PlanCheck
from parallel3d.tp.auto.derive import (
    DidNotRun,
    Group,
    Kinds,
    default_settings,
    derive_plan,
    hook_between,
    run_once,
)
from parallel3d.tp.auto.heads import resolve
from parallel3d.tp.auto.prove import NotEqual, NotProven, Proof
from parallel3d.tp.auto.trace import OUTPUT, Layer, Trace, common_path, find_layers, inside, join
from parallel3d.tp.lora import without_adapters
from parallel3d.tp.parts import hooks_on_parts, refused_hook
from parallel3d.tp.resolve import (
    PlanSource,
    Rule,
    is_in,
    matches,
    numberless,
    specificity,
)
from parallel3d.tp.styles import Colwise, Experts, Replicated, RopeOutput, Rowwise
from parallel3d.tp.styles.base import is_plain, own_params

Rules = dict[str, Rule]


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
    """Returns the plan of :func:`auto_plan` with the reason for each rule and the notes for the report."""
    model = without_adapters(model)  # whose styles follow from those of their layers
    if merged_plan(model):
        return hf_plan(model, tp_size, example)
    return derive_plan(model, tp_size, example)


@dataclass(frozen=True)
class _Fault:
    """An error in a model's own plan. ``block``: path of the smallest module around it, whose rules can be
    left out; ``""`` if it is in no block."""

    text: str
    block: str


@dataclass
class _Completion:
    """Corrects ``rules``, a model's own plan, by calls of ``step``. ``why``: pattern -> reason of each added
    rule; ``notes``: what was changed; ``unproven``: groups that could not be compared with the plain
    model."""

    model: nn.Module
    rules: Rules
    tp: int
    trace: Trace
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unproven: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proven: dict[Any, Proof | NotEqual] = {}
        self.names = _names(self.model)
        self.kinds = Kinds(dict(self.model.named_modules()), self.trace)

    def step(self) -> bool:
        """Makes one correction of ``rules``; returns False if there was nothing to correct. Raises PlanError
        if an error is in no block that could be left whole, or in the blocks of every layer."""
        resolution = resolve(self.model, PlanSource(self.rules), self.tp, strict=False)
        if resolution.ruled.keys() - resolution.rules.keys():
            return False  # styles that don't fit their modules, which ``resolve_plan`` reports
        check = PlanCheck(self.model, resolution)
        if needless := self._needless(check):
            self.rules = {p: style for p, style in self.rules.items() if p not in needless}
            text = "is not needed: what it is for is used alike on every rank"
            self.notes += [f"{pattern!r} {text}" for pattern in needless]
            return True
        if (fault := next(self._faults(check), None)) is not None:
            self._leave_whole(fault)
            return True
        if resolution.problems:
            return False
        self.unproven.clear()
        return any(self._correct(check, group) for group in check.groups(self.trace))

    def _leave_whole(self, fault: _Fault) -> None:
        block, name = numberless(fault.block), type(self.model).__name__
        within = [n for n in self.names if block and is_in(numberless(n), block)]
        dropped = [p for p in self.rules if any(matches(p, n) for n in within)]
        if not dropped:
            raise PlanError(f"the plan {name} brings is wrong: {fault.text}")
        self.rules = {p: style for p, style in self.rules.items() if p not in dropped}
        self.notes.append(
            f"{block!r} stays whole on every rank, its {len(dropped)} rules are left out: {fault.text}"
        )
        if not any("*" in pattern for pattern in self.rules):
            raise PlanError(
                f"the plan {name} brings is wrong in every layer: {'; '.join(self.notes)}"
            )

    # ---- what the run shows ----

    def _needless(self, check: PlanCheck) -> list[str]:
        """Returns the rules that would sum over tp gradients which are complete on each rank already."""
        whole: list[str] = []
        for name, one in check.ruled.items():
            if isinstance(one.style, Replicated) and one.style.tp_grad == "partial":
                paths = [join(name, n) for n in own_params(one.module)]
                if paths and all(p in self.trace.uses and not self._met(check, p) for p in paths):
                    whole += [name, *paths]
        return [p for p in self.rules if any(matches(p, name) for name in whole)]

    def _met(self, check: PlanCheck, path: str) -> set[str]:
        """Returns the layers with split outputs (or outputs whose gradients are partial sums) that an
        operation combines with the parameter at ``path``."""
        ropes = {name for name, one in check.ruled.items() if isinstance(one.style, RopeOutput)}
        return self.trace.uses.get(path, set()) & (check.ups.keys() | ropes)

    def _faults(self, check: PlanCheck) -> Iterator[_Fault]:
        ups, reads = check.ups.keys(), self.trace.reads
        for path, by in check.read_outside(self.trace):
            text = f"the model's code reads a parameter of {by!r}, which is split, by "
            linear = by in check.ups or by in check.downs
            yield _Fault(text + self.trace.read_directly[path], _around([by]) if linear else "")
        for name, one in check.ruled.items():
            parts = reads.get(name, frozenset()) & ups
            if name in check.downs:
                if name in reads and not parts:
                    text = f"{name!r} as {one.style} wants each rank's part, but its input is whole"
                    yield _Fault(text, _around([name]))
            elif parts and isinstance(one.style, (Colwise, Rowwise, Experts, RopeOutput)):
                text = f"{name!r} as {one.style} wants a whole input, but gets parts"
                yield _Fault(f"{text}, of {_quoted(parts)}", _around([*parts, name]))
            if hook := hooks_on_parts(one.module, *one.style.parts):
                yield _Fault(refused_hook(hook, name), _around([name]))
        if parts := reads[OUTPUT] & ups:
            text = f"the model's output is each rank's part, of {_quoted(parts)}"
            yield _Fault(text, _around([*parts]))

    # ---- what lies between split layers ----

    def _correct(self, check: PlanCheck, group: Group) -> bool:
        """Corrects the rules of one group if they are wrong; returns whether it changed something."""
        if (found := hook_between(group.owner, check.modules, self.trace)) is not None:
            self._leave_whole(_Fault(refused_hook(*found), group.owner))
            return True
        proof = self._proof(check, group)
        if isinstance(proof, NotProven):
            around = numberless(group.owner) or type(self.model).__name__
            self.unproven[f"what lies between split layers of {around!r}: {proof}"] = None
            return False
        if isinstance(proof, Proof):
            partial = [join(group.owner, path) for path in proof.partial]
            met = [self._met(check, path) for path in partial]
            if not all(met):  # what is computed alike on every rank meets parts
                path = partial[met.index(set())]
                text = f"the gradient of {path!r}, which meets no part, is a part on each rank"
                self._leave_whole(_Fault(text, group.owner))
                return True
            added = self._added(check, group, dict.fromkeys(partial, _SUMMED))
        else:
            added = self._split_with_heads(check, group)
            if not added:
                text = f"on its part a rank doesn't compute what the plain module does: {proof}"
                self._leave_whole(_Fault(text, group.owner))
                return True
        self.rules |= added
        return bool(added)

    def _proof(self, check: PlanCheck, group: Group) -> Proof | NotEqual:
        styles = repr([(inside(n, group.owner), s) for n, s in check.styles_in(group.owner)])
        known = group.owner in self.trace.calls
        key = self.kinds.of(group) if known else group.owner, styles
        if key not in self.proven:
            try:
                self.proven[key] = check.prove(group, self.trace)
            except NotEqual as error:
                self.proven[key] = error
        return self.proven[key]

    def _split_with_heads(self, check: PlanCheck, group: Group) -> Rules:
        """Returns rules that split parameters with values for each head over tp, if the group computes the
        same with them; else no rules."""
        cut = {
            path: "colwise"
            for path, met in self.trace.uses.items()
            if met & set(group.ups) and not any(is_in(path, name) for name in check.ruled)
            if (shape := self.model.get_parameter(path).shape)[1:] and shape[0] % self.tp == 0
        }
        noted = len(self.notes)
        added = self._added(check, group, cut)
        if added:
            source = PlanSource({**self.rules, **added})
            trial = PlanCheck(self.model, resolve(self.model, source, self.tp, strict=False))
            if not trial.resolution.problems and isinstance(self._proof(trial, group), Proof):
                return added
        del self.notes[noted:]
        return {}

    def _added(self, check: PlanCheck, group: Group, styles: dict[str, str]) -> Rules:
        """Returns ``styles`` (path -> style name) as rules for all layers; notes the reason for each."""
        added: Rules = {}
        for path, style in styles.items():
            owner = path.rpartition(".")[0]
            module = self.model.get_submodule(owner)
            ruled = owner in check.ruled
            alone = style == _SUMMED and not ruled
            alone &= all(styles.get(join(owner, n)) == style for n in module._parameters)
            pattern = numberless(owner if alone else path)
            met = self._met(check, path)
            reason = f"it acts on each rank's part, of {_quoted(map(numberless, met))}"
            if pattern not in {**self.rules, **added}:
                added[pattern], self.why[pattern] = style, f"added: {reason}"
                self.notes.append(f"{pattern!r} gets {style!r}: {reason}")
            outer = numberless(owner)
            if not alone and not ruled and outer not in {**self.rules, **added}:
                added[outer] = "local_params"
                self.why[outer] = "added: for the rules of its parameters"
        return added


_SUMMED = "replicated_with_grad_allreduce"


def _around(paths: list[str]) -> str:
    """Returns the smallest module around all ``paths``; for one path its parent."""
    return common_path(paths) if len(paths) > 1 else paths[0].rpartition(".")[0]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(set(names))))


def complete(model: nn.Module, rules: Rules, tp: int, example: Any = None) -> PlanSource:
    """Returns the model's own ``rules``, corrected and completed. If the model can't be run, the models
    inside it that have a plan are run instead. Raises PlanError if an error is in no block that could be left
    whole, or in the blocks of every layer."""
    ruled = resolve(model, PlanSource(rules), tp, strict=False).ruled_in_order()
    named = dict(model.named_modules())
    # One operation is what is ruled, or plain: a router puts out something else than a linear layer does.
    kinds = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
    plain = {name for name, m in named.items() if any(is_plain(m, kind) for kind in kinds)}
    known = {one.name for one in ruled} | plain
    layers = {name: layer for name, layer in find_layers(model).items() if name in known}
    # Experts give back a tensor like the first that they get. Without a rule they are known by their name.
    experts = {one.name for one in ruled if isinstance(one.style, Experts)}
    experts |= {name for name, m in named.items() if type(m).__name__.endswith("Experts")}
    layers |= dict.fromkeys(experts, Layer("norm", 0))
    why: dict[str, str] = {}
    notes: list[str] = []
    unproven: list[str] = []
    paths, failed = [""], ""
    for path in paths:
        try:
            trace = run_once(model, layers, None if path else example, path)
        except (DidNotRun, NotCopied) as error:
            first = f"{error}{getattr(error, 'tries', '')}".replace("\n  - ", "; ")[:160]
            unproven.append(f"{path or 'the model'} can't be run to look at it ({first})")
            failed = failed or f"the plan was taken as it is: {unproven[0]}"
            paths += [] if path else _models_inside(model)
            continue
        if path:
            failed = f"only the models inside {type(model).__name__} were looked at: {unproven[0]}"
        done = _Completion(model, rules, tp, trace, why, notes)
        while done.step():
            pass
        rules = done.rules
        unproven += done.unproven
    notes += [failed] if failed else []
    return PlanSource(rules, why, tuple(notes), "the model's plan", tuple(unproven))


def _models_inside(model: nn.Module, path: str = "") -> Iterator[str]:
    """Yields the outermost modules inside ``model`` that have a config with a plan."""
    for name, child in model.named_children():
        inner = join(path, name)
        if getattr(getattr(child, "config", None), "base_model_tp_plan", None):
            yield inner
        else:
            yield from _models_inside(child, inner)


# A Hugging Face model's plan is in ``_tp_plan`` of the model and of the models inside it, and in
# ``config.base_model_tp_plan`` of base models. transformers 5.23 merges these when a model is made; earlier
# releases merge fewer of them, so it is done here again, which changes nothing where it was done already.


def merged_plan(model: nn.Module) -> dict[str, str]:
    """Returns the rules of a Hugging Face model and of the models inside it, with their paths put before the
    patterns; of two rules with the same pattern, the outer model's is kept."""
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
    """Returns the plan of a Hugging Face model, completed, without the rules that match nothing in it. Raises
    PlanError if none of its rules matches, or it is wrong in a way that can't be corrected."""
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
    with default_settings():
        made = complete(model, rules, tp_size, example)
    return replace(made, notes=(listed, *made.notes)) if left_out else made


def _names(model: nn.Module) -> list[str]:
    every = (model.named_modules, model.named_parameters)
    return [name for named in every for name, _ in named(remove_duplicate=False)]


def _without_overlaps(plan: Mapping[str, str], names: list[str]) -> Rules:
    """Returns ``plan`` changed so that each of ``names`` matches one rule. Of two rules for a name, the one
    whose ``*`` match only numbers is kept, as in transformers, or else the more specific one; the other rule
    is replaced by one rule for each name that it keeps."""
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
