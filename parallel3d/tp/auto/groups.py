"""Groups of layers that may be split together, read off a trace; and the ways to split one."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from parallel3d.errors import PlanError
from parallel3d.tp.auto.trace import INPUT, OUTPUT, Call, Flow, Layer, describe, inside, join
from parallel3d.tp.styles import (
    Colwise,
    HeadArguments,
    LocalParams,
    LocalSizes,
    Rowwise,
    Style,
    VocabParallel,
)


@dataclass(frozen=True)
class Group:
    """Linear layers whose outputs meet in one other linear layer, and go nowhere else.

    Attributes:
        owner: the innermost module around them that is called.
        ups: the layers, to be split by output features.
        down: the layer that reads them, to be split by input features.
    """

    owner: str
    ups: tuple[str, ...]
    down: str

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.ups, self.down)


@dataclass(frozen=True)
class Way:
    """One way to split a group: path in the model -> style."""

    styles: tuple[tuple[str, Style], ...]


def find_groups(flow: Flow, layers: dict[str, Layer]) -> tuple[list[Group], dict[str, str]]:
    """The groups, and why layers are in none, by layer.

    A layer between two others is in two groups, of which one may be split. Those that should have the choice
    come first: of more layers (q, k and v before what makes their input), then the earlier in the model.
    """
    linear = [name for name in flow.reads if name in layers and layers[name].kind == "linear"]
    why_not: dict[str, str] = {}
    ups: dict[str, list[str]] = {}
    for name in linear:
        readers = flow.readers(name)
        if len(readers) == 1 and readers[0] in linear and readers[0] != name:
            ups.setdefault(readers[0], []).append(name)
        else:
            why_not[name] = _why_alone(readers)
    groups = [
        Group(owner, tuple(names), down)
        for down, names in ups.items()
        if (owner := owner_of([*names, down], flow)) is not None
    ]
    groups.sort(key=lambda group: (-len(group.ups), linear.index(group.ups[0])))
    grouped = {name for group in groups for name in group.members}
    return groups, {name: said for name, said in why_not.items() if name not in grouped}


def _why_alone(readers: list[str]) -> str:
    if not readers:
        return "nobody reads its output in the trace"
    if readers == [OUTPUT]:
        return "its output is the model's output"
    if len(readers) == 1:
        return f"its output is read by {readers[0]}, which is no linear layer"
    shown = ", ".join(readers[:3]) + (", ..." if len(readers) > 3 else "")
    return f"its output is read by {len(readers)} ({shown}), not by one linear layer only"


def owner_of(names: list[str], flow: Flow) -> str | None:
    """The innermost module around ``names`` whose call the trace saw."""
    common = names[0].split(".")[:-1]
    for name in names[1:]:
        parts = name.split(".")[:-1]
        common = [a for a, b in zip(common, parts, strict=False) if a == b][: _alike(common, parts)]
    while ".".join(common) not in flow.calls:
        if not common:
            return None
        common.pop()
    return ".".join(common)


def _alike(a: list[str], b: list[str]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class Kinds:
    """Tells groups apart of which one proof isn't enough.

    Args:
        modules: the model's, by path.
    """

    def __init__(self, modules: Mapping[str, Any], flow: Flow) -> None:
        self._modules, self._flow = modules, flow
        self._values: dict[tuple[type, str], int] = {}

    def of(self, group: Group) -> Any:
        """What is equal for groups of which one proof is enough."""
        owner = self._modules[group.owner]
        numbers = {int(part) for part in group.owner.split(".") if part.isdigit()}
        about = []
        for name, module in owner.named_modules():
            plain = tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, str, bool, tuple))
                and not (type(value) is int and value in numbers and self._varies(module, key))
            )
            shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
            about.append((name, type(module), repr(plain), shapes))
        call = self._flow.calls[group.owner]
        members = tuple(inside(name, group.owner) for name in group.members)
        return tuple(about), members, describe((call.args, call.kwargs))

    def _varies(self, module: nn.Module, key: str) -> bool:
        """Whether modules of this class have different values of an attribute, such as a layer's number."""
        kind = type(module)
        if (kind, key) not in self._values:
            found = {repr(vars(m).get(key)) for m in self._modules.values() if type(m) is kind}
            self._values[kind, key] = len(found)
        return self._values[kind, key] > 1


_MOST_WAYS = 24  # a wrong one costs a forward of one block on each rank


def ways_to_split(
    group: Group, model: nn.Module, flow: Flow, layers: dict[str, Layer]
) -> Iterator[Way]:
    """Ways to split the group, the likelier first. Most are wrong; the proof tells."""
    modules = dict(model.named_modules())
    cuts = list(_cuts(group, flow, layers))
    count = 0
    for cut in cuts:
        yield Way(tuple(_features(group, cut)))
        for style in _head_arguments(modules[group.owner], flow.calls[group.owner]):
            yield Way(((group.owner, style), *_features(group, cut)))
    for cut in cuts:
        sizes = {n for name, sections in cut.items() for n in (*sections, layers[name].features)}
        for chosen in _attributes(group, modules, sizes):
            styles: list[tuple[str, Style]] = [
                (owner, LocalSizes(names)) for owner, names in chosen.items()
            ]
            yield Way((*styles, *_features(group, cut)))
            count += 1
            if count == _MOST_WAYS:
                return


def _features(group: Group, cut: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Style]]:
    """The layers' styles."""
    for name in group.ups:
        sections = cut[name]
        yield name, Colwise(packed=sections) if len(sections) > 1 else Colwise()
    yield group.down, Rowwise()


def _head_arguments(owner: nn.Module, call: Call) -> Iterator[Style]:
    """Cutting those of the owner's arguments that may be for each head."""
    given = inspect.signature(owner.forward).bind(*call.args, **call.kwargs).arguments
    tensors = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    for name, heads in vars(owner).items():
        if type(heads) is not int or heads < 2 or "head" not in name or "dim" in name:
            continue
        found = [
            (argument, dim)
            for argument, value in tensors.items()
            for dim in (0, 1)
            # What weights compute, of three dims, is the hidden state.
            if (id(value) not in call.computed or value.dim() > 3)
            and value.dim() > 2
            and value.shape[dim] % heads == 0
        ]
        if found:
            yield HeadArguments(heads, tuple(dict(reversed(found)).items()))


def _cuts(
    group: Group, flow: Flow, layers: dict[str, Layer]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """For each layer the sections its output features are packed of; () is none."""
    seen = {name: flow.cuts.get(name, ()) for name in group.ups}
    plain: dict[str, tuple[int, ...]] = dict.fromkeys(group.ups, ())
    yield seen
    if any(seen.values()):
        yield plain
    for parts in (3, 2):
        packed = {
            name: (layers[name].features // parts,) * parts
            for name in group.ups
            if layers[name].features % parts == 0
        }
        if packed and packed != seen:
            yield {**plain, **packed}


def _attributes(
    group: Group, modules: dict[str, Any], sizes: set[int]
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Which int attributes of the modules around the group to make local, by module."""
    found: list[tuple[bool, str, str]] = []
    for path in _around(group):
        module = modules[path]
        for name, value in vars(module).items():
            if type(value) is int and value > 1 and name not in _NEVER and not name.startswith("_"):
                fits = value in sizes or ("head" in name and "dim" not in name)
                found.append((not fits, path, name))
    found.sort(key=lambda item: item[0])
    likely = [item for item in found if not item[0]]
    tried: set[tuple[tuple[bool, str, str], ...]] = set()
    for pool, most in ((likely, 2), (found, 2)):
        tries = [c for number in range(1, most + 1) for c in combinations(pool, number)]
        if pool is likely:
            tries += [tuple(likely)] if likely else []
        for chosen in tries:
            if chosen not in tried:
                tried.add(chosen)
                yield _by_module(chosen)


_NEVER = {"training", "layer_idx", "layer_id"}


def _around(group: Group) -> Iterator[str]:
    """The owner and the modules between it and the group's layers."""
    seen = {group.owner: None}
    for name in group.members:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            if len(path) > len(group.owner) and path.startswith(group.owner):
                seen[path] = None
    return iter(seen)


def _by_module(chosen: tuple[tuple[bool, str, str], ...]) -> dict[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    for _, path, name in chosen:
        result[path] = (*result.get(path, ()), name)
    return result


# Splitting the vocabulary: of the embedding that reads the model's input, and of heads over it.


@dataclass
class Findings:
    """What a derivation has found, by module.

    Attributes:
        styles: of modules that are split.
        why: the reasons for these.
        refused: the reasons why others are left whole.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def split_vocabulary(
    modules: Mapping[str, Any], layers: Mapping[str, Layer], flow: Flow, tp: int, found: Findings
) -> None:
    """Adds to ``found`` the styles of the embedding, of what is tied to it, and of heads.

    They need no proof: they take whole tensors and give whole tensors, so that it matters only that they
    are called and that nobody else reads their parameters.
    """
    _Vocabulary(modules, layers, flow, tp, found).run()


@dataclass
class _Vocabulary:
    modules: Mapping[str, Any]
    layers: Mapping[str, Layer]
    flow: Flow
    tp: int
    found: Findings

    def run(self) -> None:
        """Gives the embedding, what is tied to it, and heads over its vocabulary their styles."""
        table = self._vocabulary_embedding()
        if table is None:
            return
        size = self.modules[table].num_embeddings
        try:
            VocabParallel().plan(self.modules[table], self.tp)
        except PlanError as error:
            self.found.refused[table] = str(error)
            return
        if f"{table}.weight" in self.flow.read_directly and not self._tied_modules(table):
            op = self.flow.read_directly[f"{table}.weight"]
            self.found.refused[table] = f"its weight is read by {op} outside its module"
            return
        heads = [name for name in self._heads(size) if self._share_out(name)]
        tied = [n for n in self._tied_modules(table) if n not in heads]
        other = [n for n in tied if n not in self.layers or self.layers[n].kind != "embedding"]
        if other:
            self.found.refused[table] = f"its weight is also {other[0]}'s, which can't be split so"
            return
        for name in (table, *tied):
            self.found.styles[name] = VocabParallel()
            self.found.why[name] = f"looks up the model's input in a vocabulary of {size}"
        for head in heads:
            self.found.styles[head] = Colwise(output="replicate")
            shared = ", tied to the embedding" if head in self._tied_modules(table) else ""
            self.found.why[head] = (
                f"puts out the model's output over the vocabulary of {size}{shared}"
            )
            self.found.refused.pop(head, None)

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
            if layer.kind != "linear" or layer.features != size or name in self.found.styles:
                continue
            if self.flow.readers(name) != [OUTPUT]:
                continue
            try:
                Colwise(output="replicate").plan(self.modules[name], self.tp)
            except PlanError as error:
                self.found.refused[name] = str(error)
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
            read = [n for n in shared if join(name, n) in self.flow.read_directly]
            others = [n for n, p in module._parameters.items() if p is not None and n not in shared]
            if layer is not None or read or others or any(n != "bias" for n in shared):
                self.found.refused[head] = (
                    f"its {shared[0]} is also {name}'s, which can't be split so"
                )
                return False
            self.found.styles[name] = LocalParams((("bias", Colwise()),))
            self.found.why[name] = f"has the bias of {head}, which is split, and doesn't read it"
        return True

    def _tied_modules(self, table: str) -> list[str]:
        weight = self.modules[table].weight
        return [
            name
            for name, module in self.modules.items()
            if name != table and any(p is weight for p in module.parameters(recurse=False))
        ]
