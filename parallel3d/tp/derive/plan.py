"""derive_plan: the tensor-parallel plan of a model that brings none."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._compat import simulation_off
from parallel3d.errors import PlanError
from parallel3d.tp.chosen import ChosenPlan
from parallel3d.tp.derive.groups import Group, Way, find_groups, ways_to_split
from parallel3d.tp.derive.inputs import Example, check_example, examples
from parallel3d.tp.derive.trace import INPUT, OUTPUT, Flow, Layer, trace
from parallel3d.tp.derive.verify import NotEqual, Proof, prove
from parallel3d.tp.patterns import matches
from parallel3d.tp.styles import (
    Colwise,
    LocalParams,
    LocalSizes,
    Replicated,
    SplitHeads,
    Style,
    VocabParallel,
)
from parallel3d.tp.styles.kinds import is_embedding, linear_kind

__all__ = ["derive_plan"]


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
    with simulation_off(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Derivation(model, tp_size, example).plan()


class _Derivation:
    def __init__(self, model: nn.Module, tp: int, example: Any) -> None:
        self.model, self.tp = model, tp
        self.modules = dict(model.named_modules())
        self.layers = find_layers(model)
        self.flow = self._trace(example)
        self.styles: dict[str, Style] = {}
        self.why: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def plan(self) -> ChosenPlan:
        self._attention()
        self._groups()
        self._vocabulary()
        if not self.styles:
            raise PlanError(self._nothing())
        rules, why = _with_patterns(self.styles, self.why, self.modules)
        return ChosenPlan(rules, why, tuple(self._notes()), "derived")

    # ---- running the model ----

    def _trace(self, example: Any) -> Flow:
        given = [check_example(example)] if example is not None else list(examples(self.model))
        errors = []
        for args, kwargs in given:
            try:
                return trace(self.model, self.layers, args, kwargs)
            except Exception as error:
                errors.append(f"{_describe((args, kwargs))}: {_first_line(error)}")
        name = type(self.model).__name__
        tried = "".join(f"\n  - {error}" for error in errors[:4])
        raise PlanError(
            f"a plan for {name} can't be derived: the model must run once, and did not on "
            f"{'the example' if example is not None else 'any input guessed'}. Give a small example: "
            f"auto_plan(model, tp, example=((input,), {{}})){tried}"
        )

    # ---- torch's attention ----

    def _attention(self) -> None:
        proven: dict[Any, Proof | str] = {}
        for name in self.flow.reads:
            if name not in self.layers or self.layers[name].kind != "attention":
                continue
            key = self._kind(Group(name, (), name))
            if key not in proven:
                try:
                    styles = {"": SplitHeads()}
                    proven[key] = prove(self.modules[name], self.flow.calls[name], styles, self.tp)
                except (NotEqual, PlanError) as error:
                    proven[key] = str(error)
            found = proven[key]
            if isinstance(found, str):
                self.refused[name] = found
            else:
                self.styles[name] = SplitHeads()
                heads = self.modules[name].num_heads
                self.why[name] = f"{heads} heads of their own weights; {self._equal}"

    @property
    def _equal(self) -> str:
        return f"proven equal on {self.tp} ranks"

    # ---- groups ----

    def _groups(self) -> None:
        groups, why_not = find_groups(self.flow, self.layers)
        self.refused.update(why_not)
        proven: dict[Any, tuple[Group, Way, Proof] | str] = {}
        for group in groups:
            if any(name in self.styles for name in group.members):
                continue  # one of its layers is split with others already
            key = self._kind(group)
            if key not in proven:
                proven[key] = self._prove(group)
            self._accept(group, proven[key])

    def _prove(self, group: Group) -> tuple[Group, Way, Proof] | str:
        read = self._read_directly(group)
        if read:
            return read
        call, owner = self.flow.calls[group.owner], self.modules[group.owner]
        said: dict[str, str] = {}
        for way in ways_to_split(group, self.model, self.flow, self.layers):
            styles = {_inside(name, group.owner): style for name, style in way.styles}
            try:
                proof = prove(owner, call, styles, self.tp, frozenset(group.ups))
                extra = self._partial(owner, proof)
                if extra:
                    proof = prove(owner, call, {**styles, **extra}, self.tp, frozenset(group.ups))
                    added = tuple(
                        (_join(group.owner, name), style) for name, style in extra.items()
                    )
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
            beside = [_join(module, n) for n in own if _join(module, n) not in proof.partial]
            if beside:
                raise NotEqual(
                    f"the gradient of {path} is a part on each rank, that of {beside[0]} isn't"
                )
            styles[module] = Replicated("partial")
        return styles

    def _accept(self, group: Group, found: tuple[Group, Way, Proof] | str) -> None:
        if isinstance(found, str):
            for name in group.members:
                if name in self.refused:
                    continue
                with_ = ", ".join(_short(n, group) for n in group.members)
                self.refused[name] = f"{with_} of {group.owner or 'the model'} together: {found}"
            return
        proven, way, proof = found
        for name, style in way.styles:
            own = _join(group.owner, _inside(name, proven.owner))
            self.styles[own] = style
            self.why[own] = self._reason(own, style, group, proof)
            self.refused.pop(own, None)

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
        return f"sizes its forward uses on the parts that {down} reads; {equal}"

    def _through(self, name: str) -> list[str]:
        passed = [op.strip("_") for op in self.flow.passes.get(name, {})]
        shown = [op for op in dict.fromkeys(passed) if op not in _UNINTERESTING]
        return [*shown[:6], *(["..."] if len(shown) > 6 else [])]

    def _kind(self, group: Group) -> Any:
        """What is equal for groups of which one proof is enough."""
        owner = self.modules[group.owner]
        number = {int(part) for part in group.owner.split(".") if part.isdigit()}
        about = []
        for name, module in owner.named_modules():
            plain = tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, str, bool, tuple))
                and not (type(value) is int and value in number)
            )
            shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
            about.append((name, type(module), repr(plain), shapes))
        call = self.flow.calls[group.owner]
        members = tuple(_inside(name, group.owner) for name in group.members)
        return tuple(about), members, _describe((call.args, call.kwargs))

    # ---- vocabulary ----

    def _vocabulary(self) -> None:
        table = self._vocabulary_embedding()
        if table is None:
            return
        size = self.modules[table].num_embeddings
        try:
            VocabParallel().plan(self.modules[table], self.tp)
        except PlanError as error:
            self.refused[table] = str(error)
            return
        if f"{table}.weight" in self.flow.read_directly and not self._tied_modules(table):
            op = self.flow.read_directly[f"{table}.weight"]
            self.refused[table] = f"its weight is read by {op} outside its module"
            return
        heads = [name for name in self._heads(size) if self._share_out(name)]
        tied = [n for n in self._tied_modules(table) if n not in heads]
        other = [n for n in tied if n not in self.layers or self.layers[n].kind != "embedding"]
        if other:
            self.refused[table] = f"its weight is also {other[0]}'s, which can't be split so"
            return
        for name in (table, *tied):
            self.styles[name] = VocabParallel()
            self.why[name] = f"looks up the model's input in a vocabulary of {size}"
        for head in heads:
            self.styles[head] = Colwise(output="replicate")
            shared = ", tied to the embedding" if head in self._tied_modules(table) else ""
            self.why[head] = f"puts out the model's output over the vocabulary of {size}{shared}"
            self.refused.pop(head, None)

    def _vocabulary_embedding(self) -> str | None:
        """The largest table in which the model's own input is looked up."""
        tables = [
            name
            for name, layer in self.layers.items()
            if layer.kind == "embedding" and INPUT in self.flow.reads.get(name, ())
        ]
        return max(tables, key=lambda name: self.modules[name].num_embeddings, default=None)

    def _heads(self, size: int) -> list[str]:
        heads = []
        for name, layer in self.layers.items():
            if layer.kind != "linear" or layer.features != size or name in self.styles:
                continue
            if self.flow.readers(name) != [OUTPUT]:
                continue
            try:
                Colwise(output="replicate").plan(self.modules[name], self.tp)
            except PlanError as error:
                self.refused[name] = str(error)
                continue
            heads.append(name)
        return heads

    def _share_out(self, head: str) -> bool:
        """Whether the head's parameters can be split where other modules have them as their own too; gives
        such modules, which don't read them, rules that split them alike."""
        own = {id(p): n for n, p in self.modules[head]._parameters.items() if p is not None}
        for name, module in self.modules.items():
            layer = self.layers.get(name)
            if name == head or (layer is not None and layer.kind == "embedding"):
                continue
            shared = [n for n, p in module._parameters.items() if id(p) in own]
            if not shared:
                continue
            read = [n for n in shared if _join(name, n) in self.flow.read_directly]
            others = [n for n, p in module._parameters.items() if p is not None and n not in shared]
            if layer is not None or read or others or any(n != "bias" for n in shared):
                self.refused[head] = f"its {shared[0]} is also {name}'s, which can't be split so"
                return False
            self.styles[name] = LocalParams((("bias", Colwise()),))
            self.why[name] = f"has the bias of {head}, which is split, and doesn't read it"
        return True

    def _tied_modules(self, table: str) -> list[str]:
        weight = self.modules[table].weight
        return [
            name
            for name, module in self.modules.items()
            if name != table and any(p is weight for p in module.parameters(recurse=False))
        ]

    # ---- what is said ----

    def _notes(self) -> list[str]:
        grouped: dict[tuple[str, str], list[str]] = {}
        for name, said in self.refused.items():
            grouped.setdefault((_pattern(name), re.sub(r"\.\d+\b", ".*", said)), []).append(name)
        return [
            f"derived, left whole: {pattern if len(names) > 1 else names[0]}: {said}"
            for (pattern, said), names in grouped.items()
        ]

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


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """The modules a trace doesn't look into, by path."""
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if any(
            name.startswith(f"{n}.") for n, layer in layers.items() if layer.kind == "attention"
        ):
            continue
        if isinstance(module, nn.MultiheadAttention):
            layers[name] = Layer("attention", module.embed_dim)
            continue
        if is_embedding(module):
            layers[name] = Layer("embedding", module.embedding_dim)  # type: ignore[arg-type]
            continue
        try:
            layers[name] = Layer("linear", linear_kind(Colwise(), module).out_features)
        except PlanError:
            continue
    return layers


def _with_patterns(
    styles: Mapping[str, Style], why: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, str | Style], dict[str, str]]:
    """Rules for modules that differ only in numbers as one rule, where it then matches no others."""
    rules: dict[str, str | Style] = {}
    reasons: dict[str, str] = {}
    for name, style in styles.items():
        key = next(
            (
                pattern
                for pattern in (_pattern(name), _pattern(name, 1))
                if (alike := [n for n in modules if matches(pattern, n)])
                and len(alike) > 1
                and all(styles.get(other) == style for other in alike)
            ),
            name,
        )
        if key not in rules:
            rules[key], reasons[key] = style, why[name]
    return rules, reasons


def _pattern(name: str, most: int = 0) -> str:
    """``name`` with its numbers, or the first ``most`` of them, as wildcards."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=most)


def _sizes_of(way: Way, group: Group) -> str:
    changed = [
        f"{_join(_short(name, group), size)}"
        for name, style in way.styles
        if isinstance(style, LocalSizes)
        for size in style.names
    ]
    return f"with {', '.join(changed)} of a rank's part: " if changed else ""


def _inside(name: str, owner: str) -> str:
    return name if not owner else name[len(owner) + 1 :]


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else owner or name


def _short(name: str, group: Group) -> str:
    return _inside(name, group.owner)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _describe(example: Example) -> str:
    """Shapes and types of an example's tensors, and its other values' types."""

    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(show, value))})"
        return (
            repr(value)
            if isinstance(value, (int, float, str, type(None)))
            else type(value).__name__
        )

    args, kwargs = example
    return ", ".join([*map(show, args), *(f"{k}={show(v)}" for k, v in kwargs.items())])
