"""Checking a plan that a user wrote: whether a part of the features gives what the plain module computes.

A column-parallel layer leaves each rank with some of the features, up to the row-parallel layer that reads
them. What the model's code does between the two is right on a part if it treats each feature by itself. If it
doesn't, as in attention, it must go by heads, and know how many this rank has; ``view(b, s, self.heads, -1)``
with the plain model's number gives heads of another size, without an error.

So the model is run once, without weights, to see what lies between. What isn't by element is proven, as a
derived plan is (``verify.py``), once for layers that are alike. What can't be proven (no input that fits is
found, layers too large) must be an attention layer whose heads were found, or be vouched for by
``LocalSizes``; the report says which those are.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from parallel3d._layout.packing import Packing
from parallel3d._util import dry_run
from parallel3d.errors import PlanError
from parallel3d.tp.auto.derive import DidNotRun, as_by_default, run_once
from parallel3d.tp.auto.groups import Group, Kinds, owner_of, ways_to_split
from parallel3d.tp.auto.heads import GROUP_SIZES, HEAD_SIZES, KV_NUMBERS, NUMBERS, Attention
from parallel3d.tp.auto.prove import NotEqual, NotProven, Proof, Prover, Split
from parallel3d.tp.auto.trace import OUTPUT, Flow, Layer, find_layers, inside
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.local_attributes import NOT_COMPUTING, reads_of
from parallel3d.tp.resolve import Resolution, numberless
from parallel3d.tp.styles import (
    Colwise,
    PrepareInput,
    PrepareOutput,
    Replicated,
    Rowwise,
    SequenceParallel,
    Style,
    VocabParallel,
)
from parallel3d.tp.torch_styles import TorchStyle

_MOST_PROVEN = 50_000_000
"""Parameters of a module that is compared; a proof holds them several times in float64."""

_MOST_TRIED = 5_000_000
"""Parameters of a module for which rules that would be right are looked for; each try is a comparison."""

_REMEDY = (
    "Name those of its attributes that are sizes of what is split: {owner!r}: "
    'tp.LocalSizes(("heads",)) with its names (none: tp.LocalSizes()), or take tp_plan="auto", which finds '
    "and proves them"
)


def check_groups(
    model: nn.Module,
    resolution: Resolution,
    rules: dict[int, dict[str, ParamRule]],
    example: Any = None,
) -> list[str]:
    """Adds to the resolution's problems what the plan makes wrong.

    Args:
        rules: of the parameters, as ``Resolution.rules`` gives them.
        example: ``(args, kwargs)`` of a small batch for the model's forward.

    Returns:
        What could not be checked, a line each.
    """
    if resolution.tp == 1:
        return []
    check = _Check(model, resolution, rules)
    if not check.ups and not check.split_layers:
        return []
    with as_by_default():
        check.run(example)
    return list(dict.fromkeys(check.unchecked))


@dataclass
class _Check:
    model: nn.Module
    resolution: Resolution
    rules: dict[int, dict[str, ParamRule]]
    unchecked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules = self.resolution.modules
        self.layers = find_layers(self.model)
        # By the paths that the trace has, of modules with several.
        self.paths = {id(module): name for name, module in self.model.named_modules()}
        self.ruled = {
            self.paths[id(one.module)]: one for _, one in self.resolution.ruled_in_order()
        }
        # Where sequence parallelism begins and ends.
        norms = [n for n, one in self.ruled.items() if isinstance(one.style, SequenceParallel)]
        self.layers = dict.fromkeys(norms, Layer("norm", 0)) | self.layers
        linear = {name for name, layer in self.layers.items() if layer.kind == "linear"}
        self.ups = {
            name: one.style
            for name, one in self.ruled.items()
            if name in linear and isinstance(one.style, Colwise) and one.style.output == "shard"
        }
        self.downs = {
            name: one.style
            for name, one in self.ruled.items()
            if name in linear and isinstance(one.style, Rowwise) and one.style.input == "shard"
        }

    @property
    def split_layers(self) -> dict[str, str]:
        """Parameters of layers that ranks hold parts of -> who splits them."""
        named = {id(p): n for n, p in self.model.named_parameters()}
        return {
            named[id(one.module._parameters[own])]: name
            for name, one in self.ruled.items()
            if name in self.layers
            for own, rule in self.rules[id(one.module)].items()
            if isinstance(rule.placement, Shard) and id(one.module._parameters[own]) in named
        }

    def run(self, example: Any) -> None:
        if dry_run.active() or not _can_be_called(self.model):
            why = "a dry run" if dry_run.active() else "the model has no forward"
            self.unchecked.append(f"what lies between layers that are split: {why}")
            return
        try:
            flow = run_once(self.model, self.layers, example)
        except DidNotRun as error:
            first = (error.tries.strip().splitlines() or [""])[0].removeprefix("- ")
            said = f"the model {error} ({first}); give parallelize, or resolve_plan, example=((input,), {{}})"
            if example is not None:
                self.problem(f"the model {error}: {first}")
                return
            self.unchecked.append(f"which weights the model reads outside their modules: {said}")
            for group in self.by_structure():
                self.not_proven(group, said)
            return
        self.check_reads(flow)
        self.check_inputs(flow)
        kinds, known = Kinds(dict(self.model.named_modules()), flow), dict[Any, None]()
        for group in self.groups(flow):
            styles = tuple((inside(n, group.owner), s) for n, s in self.styles_in(group.owner))
            key = kinds.of(group), repr(styles)
            if key not in known:
                known[key] = None
                self.check_group(group, flow)
        for group in self.by_structure():
            if not any(name in flow.reads for name in group.ups):
                self.not_proven(group, "they weren't called when the model ran")

    def problem(self, said: str) -> None:
        if said not in self.resolution.problems:  # once for all layers
            self.resolution.problems.append(said)

    # ---- who reads what ----

    def check_reads(self, flow: Flow) -> None:
        """Refuses that code outside a layer reads a weight of which a rank holds a part."""
        for path, by in self.split_layers.items():
            if path in flow.read_directly:
                op = flow.read_directly[path]
                self.problem(
                    f"{path} is split over tp by {by!r} ({self.ruled[by].style}), and {op} reads it outside "
                    "its module, where it would be this rank's part; call the module, or leave it whole "
                    "('replicate')"
                )

    def check_inputs(self, flow: Flow) -> None:
        """Refuses that a layer that takes whole inputs is given parts of a sequence."""
        for name, one in self.ruled.items():
            whole = isinstance(one.style, (Colwise, Rowwise)) and one.style.input == "replicate"
            if not whole or name not in self.layers or self.is_prepared(name):
                continue
            for source in sorted(flow.reads.get(name, ())):
                if source in self.ruled and self.puts_out_parts(source):
                    by = f"{numberless(source)!r} as {self.ruled[source].style}"
                    self.problem(
                        f"{numberless(name)!r} as {one.style} takes its input to be whole, but it is made of "
                        f"what {by} puts out, parts of the sequence; give it "
                        'input="sequence", or gather them before'
                    )
                    break

    def puts_out_parts(self, name: str) -> bool:
        style = self.ruled[name].style
        kinds = (Rowwise, VocabParallel, SequenceParallel)
        return (
            isinstance(style, kinds) and style.output == "sequence" and not self.is_prepared(name)
        )

    def is_prepared(self, name: str) -> bool:
        """Whether a module around it changes what it is given, or what it gives."""
        around = [n for n, one in self.ruled.items() if isinstance(one.style, _PREPARING)]
        return any(_is_in(name, n) and name != n for n in around)

    def groups(self, flow: Flow) -> Iterator[Group]:
        """Layers that have to do with each other: split ones, and those that read what they put out."""
        found: list[tuple[set[str], set[str]]] = []
        for up in self.ups:
            readers = set(flow.readers(up))
            if OUTPUT in readers:
                self.unchecked.append(
                    f"what is made of the output of {numberless(up)!r}, which is split and reaches the "
                    "model's output"
                )
                readers.discard(OUTPUT)
            if not readers:
                continue
            ups, downs = {up}, readers
            for other in [pair for pair in found if pair[1] & readers]:
                found.remove(other)
                ups, downs = ups | other[0], downs | other[1]
            found.append((ups, downs))
        for ups, downs in found:
            owner = owner_of([*sorted(ups), *sorted(downs)], flow)
            if owner is None:  # the root isn't called by itself
                owner = ""
            # Layers between others are both: the earlier's reader, and split for the next.
            yield Group(owner, tuple(n for n in self.ups if n in ups), ", ".join(sorted(downs)))

    def by_structure(self) -> Iterator[Group]:
        """Groups as the modules' places show them."""
        taken: set[str] = set()
        for layer in self.resolution.attentions:
            ups = tuple(n for p in layer.inputs if (n := self.path(p.ruled.name)) in self.ups)
            downs = [n for p in layer.outputs if (n := self.path(p.ruled.name)) in self.downs]
            if ups and downs:
                taken.update(ups)
                yield Group(self.path(layer.name), ups, ", ".join(downs))
        parents: dict[str, list[str]] = {}
        for up in self.ups:
            if up not in taken:
                parents.setdefault(up.rpartition(".")[0], []).append(up)
        for parent, names in parents.items():
            downs = [n for n in self.downs if n.rpartition(".")[0] == parent]
            if downs:
                yield Group(parent, tuple(names), ", ".join(downs))

    # ---- one group ----

    def check_group(self, group: Group, flow: Flow) -> None:
        readers = group.down.split(", ")
        by_element = not any(name in flow.mixes for name in group.ups)
        if by_element and all(name in self.downs for name in readers) and self.cut_alike(group):
            return
        try:
            proof = self.prove(group, flow)
        except NotProven as error:
            self.not_proven(group, str(error))
            return
        except NotEqual as error:
            self.problem(
                f"{self.said(group)}: on its part a rank doesn't compute what the plain module does: "
                f"{str(error).removesuffix('.')}. {self.found_heads(group)}"
                f"{self.proven_way(group, flow) or self.remedy(group)}"
            )
            return
        for path in proof.partial:
            name = f"{group.owner}.{path}".lstrip(".").rpartition(".")[0]
            self.problem(
                f"{numberless(name)!r} has no style, and is used on each rank's part of what "
                f"{self.said(group)} split: its gradient is a part on each rank; give it "
                "'replicated_with_grad_allreduce'"
            )

    def cut_alike(self, group: Group) -> bool:
        """Whether every layer of the group is cut at the same features."""
        cuts = set()
        for name in (*group.ups, *group.down.split(", ")):
            one = self.ruled[name]
            rule = self.rules[id(one.module)].get("weight")
            if rule is None or not isinstance(rule.placement, Shard):
                return False
            rows = None if rule.packing is None else rule.packing.rows
            cuts.add((self.size_of(name), rows))
        return len(cuts) == 1

    def size_of(self, name: str) -> int:
        """How many features of a layer are split."""
        module: Any = self.modules[name]
        if name in self.ups:
            return self.layers[name].features
        return int(module.in_features if isinstance(module, nn.Linear) else module.nx)

    def prove(self, group: Group, flow: Flow) -> Proof:
        modules = dict(self.model.named_modules())
        owner: Any = modules.get(group.owner)
        if owner is None or group.owner not in flow.calls:
            raise NotProven("the module around them wasn't called when the model ran")
        size = sum(p.numel() for p in owner.parameters())
        if size > _MOST_PROVEN:
            raise NotProven(f"the module around them has {size} parameters, too many to compare")
        styles, rules = {}, {}
        named = dict(self.styles_in(group.owner))
        prepared = any(isinstance(style, PrepareInput) for style in named.values())
        for name, style in named.items():
            own = _by_itself(style, prepared)
            path = inside(name, group.owner)
            try:
                styles[path] = own
                rules[path] = own.plan(self.modules[name], self.resolution.tp)
            except PlanError as error:
                raise NotProven(str(error)) from error
        attributes = tuple(
            replace(a, module=inside(self.path(a.module), group.owner))
            for a in self.resolution.attributes
            if _is_in(self.path(a.module), group.owner)
        )
        internal = frozenset(group.ups)
        prover = Prover(owner, flow.calls[group.owner], self.resolution.tp, internal)
        return prover.prove_split(Split(styles, rules, attributes))

    def path(self, name: str) -> str:
        return self.paths[id(self.modules[name])]

    def styles_in(self, owner: str) -> Iterator[tuple[str, Style]]:
        for name, one in self.ruled.items():
            if _is_in(name, owner):
                yield name, one.style

    # ---- what can't be proven ----

    def not_proven(self, group: Group, why: str) -> None:
        layer = self.attention_of(group)
        # As the plan has it, before attention was fitted to the ranks.
        given = [self.ups[n] for n in group.ups]
        if layer is not None:
            given = [p.ruled.style for p in layer.inputs if isinstance(p.ruled.style, Colwise)]
        sized = any(_is_in(self.path(n), group.owner) for n in self.resolution.local_sizes)
        vouched = sized or any(isinstance(style.packed, Packing) for style in given)
        if vouched:
            self.unchecked.append(f"{self.said(group)}, by the sizes that the plan gives: {why}")
            return
        read = "" if layer is None else self.reads_unset(layer)
        if layer is not None and layer.heads and layer.kv_heads and not read:
            self.unchecked.append(f"{self.said(group)}, by its {layer.heads} heads: {why}")
            return
        if layer is None and not self.looks_like_attention(group):
            self.unchecked.append(f"{self.said(group)}, which must be by element between: {why}")
            return
        also = (
            f"; its forward reads self.{read}, which may be a size of what is split" if read else ""
        )
        self.problem(
            f"{self.said(group)}: it can't be shown that ranks may compute on parts: {why}{also}. "
            f"{self.found_heads(group)}{self.remedy(group)}"
        )

    def attention_of(self, group: Group) -> Attention | None:
        members = {*group.ups, *group.down.split(", ")}
        for layer in self.resolution.attentions:
            if any(self.path(p.ruled.name) in members for p in layer.inputs):
                return layer
        return None

    def reads_unset(self, layer: Attention) -> str:
        """An attribute that the layer's forward reads, and that may be a size a rank has a part of, but
        stays the plain model's."""
        assert layer.heads is None or layer.kv_heads is None or layer.heads >= layer.kv_heads
        reads = reads_of(layer.module)
        if reads is None:
            return ""
        planned = {a.name for a in self.resolution.attributes if a.module == layer.name}
        sizes = {layer.heads, layer.kv_heads, *(p.size for p in layer.projections)}
        for name in sorted(reads - planned):
            last = name.rpartition(".")[2]
            if last in _KNOWN:
                continue
            value: Any = layer.module
            for part in name.split("."):
                value = getattr(value, part, None)
            if type(value) is int and value > 1 and value in sizes:
                return name
        return ""

    def looks_like_attention(self, group: Group) -> bool:
        sizes = {self.size_of(name) for name in group.ups}
        downs = [name for name in group.down.split(", ") if name in self.downs]
        sizes |= {self.size_of(name) for name in downs}
        if len(group.ups) > 2 or len(sizes) > 1:
            return True
        owner = self.modules[group.owner]
        return not type(owner).__module__.startswith("torch.") and _mixes(
            type(owner)  # type: ignore[arg-type]  # a class has a hash
        )

    # ---- words ----

    def said(self, group: Group) -> str:
        ups = ", ".join(inside(n, group.owner) for n in group.ups)
        downs = ", ".join(inside(n, group.owner) for n in group.down.split(", "))
        text = f"{numberless(group.owner) or 'the model'!s}: {ups} -> {downs}"
        return numberless(text)

    def found_heads(self, group: Group) -> str:
        layer = self.attention_of(group)
        if layer is not None and layer.heads and layer.kv_heads:
            kv = f" and {layer.kv_heads} of keys and values" * (layer.kv_heads != layer.heads)
            return f"It was taken to have {layer.heads} heads{kv}. "
        return f"{layer.why[0].upper()}{layer.why[1:]}. " if layer is not None and layer.why else ""

    def remedy(self, group: Group) -> str:
        return _REMEDY.format(owner=numberless(group.owner))

    def proven_way(self, group: Group, flow: Flow) -> str:
        """Rules that would be right, of a module that is quickly compared."""
        owner = dict(self.model.named_modules())[group.owner]
        if group.down not in self.downs or sum(p.numel() for p in owner.parameters()) > _MOST_TRIED:
            return ""
        call, internal = flow.calls[group.owner], frozenset(group.ups)
        prover = Prover(owner, call, self.resolution.tp, internal)
        for way in ways_to_split(group, self.model, flow, self.layers):
            try:
                proof = prover.prove({inside(n, group.owner): style for n, style in way.styles})
            except (NotEqual, PlanError):
                continue
            if proof.partial:
                continue
            rules = ", ".join(
                f"{numberless(name)!r}: tp.{style}"
                for name, style in way.styles
                if name not in self.ruled or self.ruled[name].style != style
            )
            if rules:
                return f'With these rules it is proven equal: {rules}; tp_plan="auto" finds such rules itself'
        return ""


_PREPARING = (PrepareInput, PrepareOutput, TorchStyle)
_KNOWN = {*NUMBERS, *KV_NUMBERS, *GROUP_SIZES, *HEAD_SIZES, "training", "layer_idx", "layer_id"}


def _can_be_called(model: nn.Module) -> bool:
    return type(model).forward is not nn.Module.forward or "forward" in vars(model)


def _is_in(name: str, owner: str) -> bool:
    return owner in ("", name) or name.startswith(f"{owner}.")


def _by_itself(style: Style, prepared: bool) -> Style:
    """The style in a module that is given whole inputs, and gives whole outputs, as the plain one does."""
    if isinstance(style, TorchStyle):
        raise NotProven("torch's styles need the mesh")
    if isinstance(style, SequenceParallel):
        return Replicated()
    if isinstance(style, (Colwise, Rowwise, VocabParallel)):
        changes: dict[str, Any] = {
            f.name: "replicate" for f in fields(style) if getattr(style, f.name) == "sequence"
        }
        if isinstance(style, Colwise):
            changes["chunks"] = 1
            if style.input == "gathered" and not prepared:
                changes["input"] = "replicate"
        return replace(style, **changes)
    if type(style) is PrepareInput:
        names = tuple(name for name, _ in style.named)
        return replace(style, layout="replicate", keywords=names)
    if style.takes_parts or style.splits_sequence:
        raise NotProven(f"{style} needs parts of a sequence")
    return style


_MIXING = {
    *(
        "view",
        "reshape",
        "unflatten",
        "rearrange",
        "einsum",
        "softmax",
        "log_softmax",
        "split",
        "chunk",
    ),
    *(
        "transpose",
        "permute",
        "matmul",
        "bmm",
        "baddbmm",
        "scaled_dot_product_attention",
        "split_with_sizes",
    ),
    *(
        "unbind",
        "view_as",
        "reshape_as",
        "mean",
        "sum",
        "norm",
        "var",
        "std",
        "cumsum",
        "sort",
        "topk",
    ),
    *(
        "layer_norm",
        "rms_norm",
        "group_norm",
        "normalize",
        "roll",
        "flip",
        "conv1d",
        "max",
        "min",
        "tensor_split",
    ),
}


@functools.cache
def _mixes(cls: type) -> bool:
    """Whether what a class computes calls an operation that isn't by element, as far as its source shows."""
    methods = [m for n, m in vars(cls).items() if n not in NOT_COMPUTING and inspect.isfunction(m)]
    try:
        trees = [ast.parse(textwrap.dedent(inspect.getsource(m))) for m in methods]
    except (OSError, TypeError, SyntaxError):
        return True
    nodes = [node for tree in trees for node in ast.walk(tree)]
    products = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for n in nodes)
    return products or any(_called(n) in _MIXING for n in nodes if isinstance(n, ast.Call))


def _called(node: ast.Call) -> str:
    """The name of the function, or of the method of something else than ``self``."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return "" if isinstance(owner, ast.Name) and owner.id == "self" else node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
