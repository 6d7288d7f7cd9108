"""derive_plan: the tensor-parallel plan of a model that brings none."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parallel3d._torch.simulated import simulation_off
from parallel3d.errors import PlanError
from parallel3d.tp.auto.groups import (
    Findings,
    Group,
    Kinds,
    Way,
    find_groups,
    split_vocabulary,
    ways_to_split,
)
from parallel3d.tp.auto.prove import NotEqual, Proof, Prover
from parallel3d.tp.auto.trace import (
    Flow,
    Layer,
    check_example,
    describe,
    examples,
    find_layers,
    inside,
    join,
    pattern_of,
    trace,
    with_patterns,
)
from parallel3d.tp.resolve import ChosenPlan, Rule
from parallel3d.tp.styles import HeadArguments, LocalSizes, Replicated, SplitHeads, Style


def derive_plan(model: nn.Module, tp_size: int, example: Any = None) -> ChosenPlan:
    """A plan for ``model``, found by running it once and proven before it is given.

    A copy without weights runs, and shows which linear layers' outputs meet in one other linear layer and go
    nowhere else: q, k and v in the output projection, gate and up in down. Such a group is split over ``tp``
    if the module around it then computes what it did: forward and gradients, with random weights in float64,
    on ``tp_size`` ranks that are threads of this process. What isn't proven stays whole, with the reason in
    the plan's notes. The vocabulary of the embedding, and of the head, is split too.

    Nothing depends on weights, time or the rank: all ranks derive the same plan. They needn't communicate,
    and a process group may exist.

    Args:
        model: a plain model, possibly on the meta device; it isn't changed.
        tp_size: ranks of the ``tp`` axis.
        example: ``(args, kwargs)`` for the model's forward, of a small batch. By default a Hugging Face
            model's ``dummy_inputs``, or a guess from the first module with weights.

    Raises:
        PlanError: the model can't be run, or nothing of it can be split; lists the reasons.
    """
    with as_by_default():
        return _Derivation(model, tp_size, example).plan()


@contextmanager
def as_by_default() -> Iterator[None]:
    """Whatever modes, defaults and seeds the caller has, and puts back."""
    dtype = torch.get_default_dtype()
    with (
        simulation_off(),
        torch.inference_mode(False),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


class DidNotRun(Exception):
    """The model ran on no input. Attributes: tries: what each input led to, a line for each."""

    def __init__(self, said: str, tries: str) -> None:
        super().__init__(said)
        self.tries = tries


def run_once(model: nn.Module, layers: dict[str, Layer], example: Any = None) -> Flow:
    """The trace of ``model`` on ``example``, or else on an input that may fit it.

    Raises:
        DidNotRun: on none of them.
    """
    given = [check_example(example)] if example is not None else list(examples(model))
    errors = []
    for args, kwargs in given:
        try:
            return trace(model, layers, args, kwargs)
        except Exception as error:
            errors.append(f"{describe((args, kwargs))}: {_first_line(error)}")
    tries = "".join(f"\n  - {error}" for error in errors[:4])
    on = "the example" if example is not None else "any input guessed"
    raise DidNotRun(f"did not on {on}", tries)


_MOST_PARAMETERS = 10**9  # a proof holds them and their gradients twice, in float64


class _Derivation:
    def __init__(self, model: nn.Module, tp: int, example: Any) -> None:
        self.model, self.tp = model, tp
        self.modules = dict(model.named_modules())
        self.layers = find_layers(model)
        self.flow = self._trace(example)
        self.found = Findings()
        self._kinds = Kinds(self.modules, self.flow)

    def plan(self) -> ChosenPlan:
        self._attention()
        self._groups()
        split_vocabulary(self.modules, self.layers, self.flow, self.tp, self.found)
        if not self.found.styles:
            raise PlanError(self._nothing())
        rules, why = with_patterns(self.found.styles, self.found.why, self.modules)
        return ChosenPlan(rules, why, tuple(self._notes()), "derived")

    # ---- running the model ----

    def _trace(self, example: Any) -> Flow:
        try:
            return run_once(self.model, self.layers, example)
        except DidNotRun as error:
            name = type(self.model).__name__
            raise PlanError(
                f"a plan for {name} can't be derived: the model must run once, and {error}. Give a small "
                f"example: auto_plan(model, tp, example=((input,), {{}})){error.tries}"
            ) from None

    # ---- torch's attention ----

    def _attention(self) -> None:
        proven: dict[Any, Proof | str] = {}
        for name in self.flow.reads:
            if name not in self.layers or self.layers[name].kind != "attention":
                continue
            key = self._kinds.of(Group(name, (), name))
            if key not in proven:
                try:
                    prover = Prover(self.modules[name], self.flow.calls[name], self.tp)
                    proven[key] = prover.prove({"": SplitHeads()})
                except (NotEqual, PlanError) as error:
                    proven[key] = str(error)
            found = proven[key]
            if isinstance(found, str):
                self.found.refused[name] = found
            else:
                self.found.styles[name] = SplitHeads()
                heads = self.modules[name].num_heads
                self.found.why[name] = f"{heads} heads of their own weights; {self._equal}"

    @property
    def _equal(self) -> str:
        return f"proven equal on {self.tp} ranks"

    # ---- groups ----

    def _groups(self) -> None:
        groups, why_not = find_groups(self.flow, self.layers)
        self.found.refused.update(why_not)
        proven: dict[Any, tuple[Group, Way, Proof] | str] = {}
        for group in groups:
            if any(name in self.found.styles for name in group.members):
                continue  # one of its layers is split with others already
            key = self._kinds.of(group)
            if key not in proven:
                proven[key] = self._prove(group)
            self._accept(group, proven[key])

    def _prove(self, group: Group) -> tuple[Group, Way, Proof] | str:
        read = self._read_directly(group)
        if read:
            return read
        call, owner = self.flow.calls[group.owner], self.modules[group.owner]
        size = sum(p.numel() for p in owner.parameters())
        if size > _MOST_PARAMETERS:
            return f"the module around them has {size} parameters, too many to prove anything of it"
        prover = Prover(owner, call, self.tp, frozenset(group.ups))
        said: dict[str, str] = {}
        for way in ways_to_split(group, self.model, self.flow, self.layers):
            styles = {inside(name, group.owner): style for name, style in way.styles}
            try:
                proof = prover.prove(styles)
                extra = self._partial(owner, proof)
                if extra:
                    proof = prover.prove({**styles, **extra})
                    added = ((join(group.owner, name), style) for name, style in extra.items())
                    way = Way((*way.styles, *added))
                return group, way, proof
            except (NotEqual, PlanError) as error:
                said.setdefault(str(error), _sizes_of(way, group))
        first, *others = said.items()
        second = next((f"; {sizes}{error}" for error, sizes in others if sizes), "")
        return f"{first[0]}{second}"

    def _read_directly(self, group: Group) -> str:
        for name in group.members:
            for own in ("weight", "bias"):
                path = f"{name}.{own}"
                if path in self.flow.read_directly:
                    return f"{path} is read by {self.flow.read_directly[path]} outside its module"
        return ""

    def _partial(self, owner: nn.Module, proof: Proof) -> dict[str, Style]:
        """Styles for parameters used on each rank's part, of which the proof saw parts of gradients."""
        modules = dict(owner.named_modules())
        styles: dict[str, Style] = {}
        for path in proof.partial:
            module = path.rpartition(".")[0]
            own = [n for n, p in modules[module]._parameters.items() if p is not None]
            beside = [join(module, n) for n in own if join(module, n) not in proof.partial]
            if beside:
                raise NotEqual(
                    f"the gradient of {path} is a part on each rank, that of {beside[0]} isn't"
                )
            styles[module] = Replicated("partial")
        return styles

    def _accept(self, group: Group, found: tuple[Group, Way, Proof] | str) -> None:
        if isinstance(found, str):
            for name in group.members:
                if name in self.found.refused:
                    continue
                with_ = ", ".join(_short(n, group) for n in group.members)
                self.found.refused[name] = (
                    f"{with_} of {group.owner or 'the model'} together: {found}"
                )
            return
        proven, way, proof = found
        for name, style in way.styles:
            own = join(group.owner, inside(name, proven.owner))
            self.found.styles[own] = style
            self.found.why[own] = self._reason(own, style, group, proof)
            self.found.refused.pop(own, None)

    def _reason(self, name: str, style: Style, group: Group, proof: Proof) -> str:
        equal = self._equal
        down = _short(group.down, group)
        if name == group.down:
            return f"reads {', '.join(_short(n, group) for n in group.ups)} and nothing else split; {equal}"
        if name in group.ups:
            way = ", ".join(self._through(name))
            return f"its output reaches {down} only, through {way or 'nothing'}; {equal}"
        if isinstance(style, Replicated):
            return f"used on each rank's part, on the way to {down}; {equal}"
        if isinstance(style, HeadArguments):
            names = ", ".join(argument for argument, _ in style.arguments)
            return f"gets {names} for all heads, and has a part of them; {equal}"
        return f"sizes its forward uses on the parts that {down} reads; {equal}"

    def _through(self, name: str) -> list[str]:
        passed = [op.strip("_") for op in self.flow.passes.get(name, {})]
        shown = [op for op in dict.fromkeys(passed) if op not in _UNINTERESTING]
        return [*shown[:6], *(["..."] if len(shown) > 6 else [])]

    # ---- what is said ----

    def _notes(self) -> list[str]:
        grouped: dict[str, list[str]] = {}
        for name, said in self.found.refused.items():
            grouped.setdefault(re.sub(r"\.\d+\b", ".*", said), []).append(name)
        return [
            f"derived, left whole: {', '.join(self._shortly(names))}: {said}"
            for said, names in grouped.items()
        ]

    def _shortly(self, names: list[str]) -> list[str]:
        """Names as patterns, where all that match are among them."""
        shown = []
        for name in names:
            pattern = pattern_of(name)
            alike = [other for other in self.layers if pattern_of(other) == pattern]
            shown.append(pattern if set(alike) <= set(names) else name)
        return list(dict.fromkeys(shown))

    def _nothing(self) -> str:
        listed = "".join(f"\n  - {note}" for note in self._notes())
        return (
            f"no plan can be derived for {type(self.model).__name__} on {self.tp} tp ranks: nothing of it "
            f"was proven to be the same when split{listed or '; it has no linear layers that were called'}"
        )


_UNINTERESTING = {
    "detach",
    "clone",
    "alias",
    "empty_like",
    "new_zeros",
    "copy",
    "to_copy",
    "_to_copy",
    "sym_size",
}


def _sizes_of(way: Way, group: Group) -> str:
    changed = [
        f"{join(_short(name, group), size)}"
        for name, style in way.styles
        if isinstance(style, LocalSizes)
        for size in style.names
    ]
    return f"with {', '.join(changed)} of a rank's part: " if changed else ""


def _short(name: str, group: Group) -> str:
    return inside(name, group.owner)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# tp_plan="auto": the plan a model brings, or one derived from it.


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
    from parallel3d.tp.auto.complete import has_hf_plan, hf_plan

    if has_hf_plan(model):
        return hf_plan(model, tp_size, example)
    return derive_plan(model, tp_size, example)
