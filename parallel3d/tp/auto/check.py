"""Checks of a user's plan: whether the model's code computes the same on a part of the features.

A column-parallel layer leaves each rank with some of the features, up to the row-parallel layer that reads
them. Elementwise code between the two is right on a part. Other code, such as attention, must go by heads and
use this rank's number of them; ``view(b, s, self.heads, -1)`` with the plain model's number gives heads of
another size, without an error.

So the model is run once, without weights, which shows the code between them. What isn't elementwise is
proven, as a derived plan is (``prove.py``), once for layers that are alike. What can't be proven (no input is
known that fits, layers too large) must be an attention layer whose heads are known, or have a ``LocalSizes``;
the report lists it.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from parallel3d._layout.packing import Packing
from parallel3d._trace.copies import NotCopied
from parallel3d._util import dry_run
from parallel3d.errors import PlanError
from parallel3d.tp.auto.derive import (
    DidNotRun,
    Group,
    Kinds,
    default_settings,
    ends_of,
    owner_of,
    run_once,
    ways_to_split,
)
from parallel3d.tp.auto.heads import GROUP_SIZES, HEAD_SIZES, KV_NUMBERS, NUMBERS, Attention
from parallel3d.tp.auto.prove import (
    OF_WHOLE_INPUT,
    NotEqual,
    NotProven,
    Proof,
    Prover,
    Split,
    cost,
)
from parallel3d.tp.auto.trace import OUTPUT, Layer, Trace, find_layers, inside
from parallel3d.tp.local_attributes import method_trees, reads_of
from parallel3d.tp.resolve import Resolution, is_in, numberless
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


def check_groups(model: nn.Module, resolution: Resolution, example: Any = None) -> list[str]:
    """Appends to ``resolution.problems`` a message about each group of layers that would compute wrong
    results under the plan, and returns messages about layers that could not be checked. ``example``: (args,
    kwargs) of a forward."""
    if resolution.tp == 1:
        return []
    check = PlanCheck(model, resolution)
    if not check.ups and not check.split_params:
        return []
    with default_settings():
        check.run(example)
    return list(dict.fromkeys(check.unchecked))


@dataclass
class PlanCheck:
    """Checks one plan: which layers would compute wrong results on this rank's part of their inputs or
    weights. Messages go to ``resolution.problems``, or to ``unchecked`` where nothing could be compared.

    Attributes:
        ruled: path -> module with a style. A module with several paths has the path that the trace uses.
        layers: path -> module that the trace runs as one operation.
        ups, downs: path -> style of the linear layers that are split by output features, and by input
            features.
        split_params: path of a parameter that is split over tp -> path of the layer that owns it.
    """

    model: nn.Module
    resolution: Resolution
    unchecked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = {id(module): name for name, module in self.model.named_modules()}
        self.modules = dict(self.model.named_modules())
        ruled = self.resolution.ruled_in_order()
        self.ruled = {self.paths[id(one.module)]: one for one in ruled}
        # Norms too: sequence parallelism begins and ends at them.
        norms = [n for n, one in self.ruled.items() if isinstance(one.style, SequenceParallel)]
        self.layers = dict.fromkeys(norms, Layer("norm", 0)) | find_layers(self.model)
        linear = [name for name, layer in self.layers.items() if layer.kind == "linear"]
        styles = {name: one.style for name, one in self.ruled.items() if name in linear}
        self.ups = {
            n: s for n, s in styles.items() if isinstance(s, Colwise) and s.output == "shard"
        }
        self.downs = {
            n: s for n, s in styles.items() if isinstance(s, Rowwise) and s.input == "shard"
        }
        named = {id(p): n for n, p in self.model.named_parameters()}
        self.split_params = {
            named[id(one.module._parameters[own])]: name
            for name, one in self.ruled.items()
            if name in self.layers
            for own, rule in self.resolution.rules[id(one.module)].items()
            if isinstance(rule.placement, Shard) and id(one.module._parameters[own]) in named
        }

    def run(self, example: Any) -> None:
        model = self.model
        has_forward = type(model).forward is not nn.Module.forward or "forward" in vars(model)
        if dry_run.active() or not has_forward:
            why = "a dry run" if dry_run.active() else "the model has no forward"
            self.unchecked.append(f"what lies between layers that are split: {why}")
            return
        try:
            trace = run_once(model, self.layers, example)
        except (DidNotRun, NotCopied) as error:
            why = str(error)
            if isinstance(error, DidNotRun):
                first = (error.tries.strip().splitlines() or [""])[0].removeprefix("- ")
                if example is not None:
                    self.problem(f"the model {error}: {first}")
                    return
                give = "give parallelize checks=Checks(example=((input,), {})), or resolve_plan the example"
                why = f"the model {error} ({first}); {give}"
            self.unchecked.append(f"which weights the model reads outside their modules: {why}")
            for group in self.by_structure():
                self.not_proven(group, why)
            return
        self.check_reads(trace)
        self.check_inputs(trace)
        kinds, known = Kinds(self.modules, trace), set()
        for group in self.groups(trace):
            styles = [(inside(n, group.owner), s) for n, s in self.styles_in(group.owner)]
            key = kinds.of(group), repr(styles)
            if key not in known:
                known.add(key)
                self.check_group(group, trace)
        for group in self.by_structure():
            if not any(name in trace.reads for name in group.ups):
                self.not_proven(group, "they weren't called when the model ran")

    def problem(self, message: str) -> None:
        """Appends ``message`` to the resolution's problems, once for all layers of a kind."""
        if message not in self.resolution.problems:
            self.resolution.problems.append(message)

    # ---- who reads what ----

    def check_reads(self, trace: Trace) -> None:
        """Adds a problem for each split weight that code outside its layer reads in the trace: that code
        would get only this rank's part of the weight."""
        for path, by in self.read_outside(trace):
            self.problem(
                f"{path} is split over tp by {by!r} ({self.ruled[by].style}), and "
                f"{trace.read_directly[path]} reads it outside its module, where it would be this "
                "rank's part; call the module, or leave it whole ('replicate')"
            )

    def read_outside(self, trace: Trace) -> Iterator[tuple[str, str]]:
        """Yields (path of a split parameter, path of its layer) if code outside the layer reads it."""
        for path, by in self.split_params.items():
            # A module with a rule of its own, whose class has a forward of its own, reads its own weight.
            own = path.rpartition(".")[0]
            if path in trace.read_directly and (own == by or own not in self.ruled):
                yield path, by

    def check_inputs(self, trace: Trace) -> None:
        """Adds a problem for each layer whose style takes the whole sequence, but whose input comes from a
        layer that gives each rank only a part of the sequence."""
        for name, one in self.ruled.items():
            whole = isinstance(one.style, (Colwise, Rowwise)) and one.style.input == "replicate"
            if not whole or name not in self.layers or self.is_prepared(name):
                continue
            parts = filter(self.puts_out_parts, sorted(trace.reads.get(name, ())))
            if (source := next(parts, None)) is not None:
                self.problem(
                    f"{numberless(name)!r} as {one.style} takes its input to be whole, but it is made of "
                    f"what {numberless(source)!r} as {self.ruled[source].style} puts out, parts of the "
                    'sequence; give it input="sequence", or gather them before'
                )

    def puts_out_parts(self, name: str) -> bool:
        style = self.ruled[name].style if name in self.ruled else None
        layer = isinstance(style, (Rowwise, VocabParallel, SequenceParallel))
        return layer and style.output == "sequence" and not self.is_prepared(name)  # type: ignore[union-attr]

    def is_prepared(self, name: str) -> bool:
        """Whether a module around ``name`` has a style that changes the layout of its input or output."""
        kinds = (PrepareInput, PrepareOutput, TorchStyle)
        around = (n for n, one in self.ruled.items() if isinstance(one.style, kinds))
        return any(is_in(name, n) and name != n for n in around)

    # ---- groups ----

    def groups(self, trace: Trace) -> Iterator[Group]:
        """Yields groups found in the trace: layers split by output features, and all layers that read their
        outputs. Layers that are read by the same layer are in one group."""
        joined: list[tuple[set[str], set[str]]] = []
        for up in self.ups:
            downs = set(trace.readers(up))
            if OUTPUT in downs:
                self.unchecked.append(
                    f"what is made of the output of {numberless(up)!r}, which is split and reaches the "
                    "model's output"
                )
                downs.discard(OUTPUT)
            if not downs:
                continue
            ups = {up}
            for other in [pair for pair in joined if pair[1] & downs]:
                joined.remove(other)
                ups, downs = ups | other[0], downs | other[1]
            joined.append((ups, downs))
        for ups, downs in joined:
            # The root may not be called by itself. A layer between two others may be in ups and downs.
            owner = owner_of([*sorted(ups), *sorted(downs)], trace) or ""
            yield Group(owner, tuple(n for n in self.ups if n in ups), tuple(sorted(downs)))

    def by_structure(self) -> Iterator[Group]:
        """Yields groups without a trace: an attention layer's projections, or linear layers of one parent."""
        attention: set[str] = set()
        for layer in self.resolution.attentions:
            inputs = [self.paths[id(p.ruled.module)] for p in layer.inputs]
            outputs = [self.paths[id(p.ruled.module)] for p in layer.outputs]
            ups = tuple(name for name in inputs if name in self.ups)
            downs = tuple(name for name in outputs if name in self.downs)
            if ups and downs:
                attention.update(ups)
                yield Group(self.paths[id(layer.module)], ups, downs)
        parents: dict[str, list[str]] = {}
        for up in self.ups:
            if up not in attention:
                parents.setdefault(up.rpartition(".")[0], []).append(up)
        for parent, names in parents.items():
            downs = tuple(n for n in self.downs if n.rpartition(".")[0] == parent)
            if downs:
                yield Group(parent, tuple(names), downs)

    def check_group(self, group: Group, trace: Trace) -> None:
        by_element = not any(name in trace.mixes for name in group.ups)
        split = all(name in self.downs for name in group.downs)
        if by_element and split and self.split_alike(group):
            return
        try:
            proof = self.prove(group, trace)
        except NotProven as error:
            self.not_proven(group, str(error))
            return
        except NotEqual as error:
            wrong = str(error).removesuffix(".")
            if unread := self.whole_readers(group, trace):
                self.problem(f"{unread}. As the plan is, {wrong}")
                return
            way = self.proven_way(group, trace)
            if not way and not wrong.endswith(OF_WHOLE_INPUT):  # which no rule of a plan changes
                way = self.remedy(group, True)
            self.problem(
                f"{_describe(group)}: on its part a rank doesn't compute what the plain module does: "
                f"{wrong}. {self.known_heads(group)}{way}".strip()
            )
            return
        for path in proof.partial:
            name = f"{group.owner}.{path}".lstrip(".").rpartition(".")[0]
            self.problem(
                f"{numberless(name)!r} has no style, and is used on each rank's part of what "
                f"{_describe(group)} split: its gradient is a part on each rank; give it "
                "'replicated_with_grad_allreduce'"
            )

    def whole_readers(self, group: Group, trace: Trace) -> str:
        """Returns a message about the linear layers of the group that get a part of their input features but,
        by their style, expect all of them; ``""`` if there are none."""
        linear = [n for n in group.downs if self.layers[n].kind == "linear" and n not in self.downs]
        split = [n for n in group.ups if not {*linear}.isdisjoint(trace.readers(n))]
        downs, ups = ([*dict.fromkeys(map(numberless, names))] for names in (linear, split))
        if not downs:
            return ""
        read, these = ("reads", repr(downs[0])) if len(downs) == 1 else ("read", "these")
        return (
            f"{', '.join(map(repr, downs))} {read} the output of {', '.join(map(repr, ups))}, of which each "
            f"rank has a part, as if it were whole. Give {these} the style 'rowwise', or "
            f"{repr(ups[0]) if len(ups) == 1 else 'those'} 'colwise_gather_output'"
        )

    def remedy(self, group: Group, wrong: bool) -> str:
        """Returns the advice that ends the error message about a group. ``wrong``: a comparison showed that
        its results are wrong; else they could not be compared."""
        owner, auto = self.modules[group.owner], 'tp_plan="auto", which finds and proves its rules'
        rule = f"{numberless(group.owner)!r}: tp.LocalSizes"
        reads = reads_of(owner)
        sizes = [name for name in sorted(reads or ()) if type(getattr(owner, name, None)) is int]
        none = f"; or, if none is, {rule}()" * (not wrong)
        if sizes or reads is None:
            shown = ", ".join(f"self.{name}" for name in sizes) or "attributes"
            named = f'{rule}(("{(sizes or ["heads"])[0]}",))'
            return (
                f"Its forward reads {shown}: name those that are sizes of what is split, by {named}{none}; "
                f"or take {auto}"
            )
        if wrong:
            return (
                "What lies between them isn't right on a part of the features, and reads no attribute that "
                f"is a size of them: leave them whole, or take {auto}"
            )
        return f"If its forward is right on a part, add {rule}() to the plan; else take {auto}"

    def split_alike(self, group: Group) -> bool:
        """Whether all layers of the group are split alike: each rank has the same features of each."""
        rules = {n: self.resolution.rules[id(self.modules[n])].get("weight") for n in group.members}
        if not all(rule and isinstance(rule.placement, Shard) for rule in rules.values()):
            return False
        cuts = {(self.size_of(n), r.packing and r.packing.rows) for n, r in rules.items() if r}
        return len(cuts) == 1

    def size_of(self, name: str) -> int:
        """Returns the whole size of the split dim: output features for ``ups``, else input features."""
        module: Any = self.modules[name]
        if name in self.ups:
            return self.layers[name].features
        return int(module.in_features if isinstance(module, nn.Linear) else module.nx)

    def prove(self, group: Group, trace: Trace) -> Proof:
        if group.owner not in trace.calls:
            raise NotProven("the module around them wasn't called when the model ran")
        size = cost(self.modules[group.owner], ends_of(group))
        if size > _MOST_PROVEN:
            raise NotProven(f"the module around them has {size} parameters, too many to compare")
        styles, rules = {}, {}
        named = dict(self.styles_in(group.owner))
        prepared = any(isinstance(style, PrepareInput) for style in named.values())
        for name, style in named.items():
            path = inside(name, group.owner)
            styles[path] = _with_whole_inputs(style, prepared)
            try:
                rules[path] = styles[path].plan(self.modules[name], self.resolution.tp)
            except PlanError as error:
                raise NotProven(str(error)) from error
        attributes = tuple(
            replace(attribute, module=inside(path, group.owner))
            for attribute in self.resolution.attributes
            if is_in(path := self.paths[id(self.resolution.modules[attribute.module])], group.owner)
        )
        return self.prover(group, trace).prove_split(Split(styles, rules, attributes))

    def prover(self, group: Group, trace: Trace) -> Prover:
        owner, call = self.modules[group.owner], trace.calls[group.owner]
        ups, ends = frozenset(group.ups), ends_of(group)
        return Prover(owner, call, self.resolution.tp, ups, ends=ends)

    def styles_in(self, owner: str) -> Iterator[tuple[str, Style]]:
        return ((name, one.style) for name, one in self.ruled.items() if is_in(name, owner))

    # ---- what can't be proven ----

    def not_proven(self, group: Group, why: str) -> None:
        """Reports a group that could not be compared with the plain module, for the reason ``why``: as
        unchecked if the plan sets its sizes, its heads are known, or the code between its layers is probably
        elementwise; else as a problem."""
        layer, described = self.attention_of(group), _describe(group)
        # The styles in the plan, before ``resolve`` changed them.
        styles: list[Style] = [self.ups[n] for n in group.ups]
        if layer is not None:
            styles = [p.ruled.style for p in layer.inputs]
        packed = any(isinstance(getattr(style, "packed", 1), Packing) for style in styles)
        sized = (self.paths[id(self.resolution.modules[n])] for n in self.resolution.local_sizes)
        read = "" if layer is None else self.reads_unset(layer)
        if packed or any(is_in(path, group.owner) for path in sized):
            self.unchecked.append(f"{described}, by the sizes that the plan gives: {why}")
        elif layer is not None and layer.heads and layer.kv_heads and not read:
            self.unchecked.append(f"{described}, by its {layer.heads} heads: {why}")
        elif layer is None and not self.looks_like_attention(group):
            self.unchecked.append(f"{described}, which must be by element between: {why}")
        else:
            if read:
                why += f"; its forward reads self.{read}, which may be a size of what is split"
            self.problem(
                f"{described}: it can't be shown that ranks may compute on parts: {why}. "
                f"{self.known_heads(group)}{self.remedy(group, False)}"
            )

    def attention_of(self, group: Group) -> Attention | None:
        members = {id(self.modules[name]) for name in group.members}
        layers = self.resolution.attentions
        return next(
            (a for a in layers if any(id(p.ruled.module) in members for p in a.inputs)), None
        )

    def reads_unset(self, layer: Attention) -> str:
        """Returns the name of an int attribute that the layer's forward reads, that equals one of its numbers
        of heads or features, and that the plan doesn't change to this rank's number; ``""`` if there is
        none."""
        reads = reads_of(layer.module)
        if reads is None:
            return ""
        planned = {a.name for a in self.resolution.attributes if a.module == layer.name}
        sizes = {layer.heads, layer.kv_heads, *(p.size for p in layer.projections)}
        for name in sorted(reads - planned):
            if name.rpartition(".")[2] in _KNOWN:
                continue
            value: Any = layer.module
            for part in name.split("."):
                value = getattr(value, part, None)
            if type(value) is int and value > 1 and value in sizes:
                return name
        return ""

    def looks_like_attention(self, group: Group) -> bool:
        downs = [name for name in group.downs if name in self.downs]
        if len(group.ups) > 2 or len({self.size_of(name) for name in (*group.ups, *downs)}) > 1:
            return True
        owner: Any = type(self.modules[group.owner])
        return not owner.__module__.startswith("torch.") and _mixes(owner)

    def known_heads(self, group: Group) -> str:
        layer = self.attention_of(group)
        if layer is not None and layer.heads and layer.kv_heads:
            kv = f" and {layer.kv_heads} of keys and values" * (layer.kv_heads != layer.heads)
            return f"It was taken to have {layer.heads} heads{kv}. "
        return f"{layer.why[0].upper()}{layer.why[1:]}. " if layer is not None and layer.why else ""

    def proven_way(self, group: Group, trace: Trace) -> str:
        """Tries other rules for the group and returns advice with the first ones under which its module
        computes the same as the plain one; ``""`` if none does or the module is too large for trials."""
        size = cost(self.modules[group.owner], ends_of(group))
        if not (len(group.downs) == 1 and group.downs[0] in self.downs) or size > _MOST_TRIED:
            return ""
        prover = self.prover(group, trace)
        for way in ways_to_split(group, self.model, trace, self.layers):
            try:
                proof = prover.prove({inside(n, group.owner): style for n, style in way.items()})
            except (NotEqual, PlanError):
                continue
            rules = ", ".join(
                f"{numberless(name)!r}: tp.{style}"
                for name, style in way.items()
                if name not in self.ruled or self.ruled[name].style != style
            )
            if rules and not proof.partial:
                return f'With these rules it is proven equal: {rules}; tp_plan="auto" finds such rules itself'
        return ""


_KNOWN = {*NUMBERS, *KV_NUMBERS, *GROUP_SIZES, *HEAD_SIZES, "training", "layer_idx", "layer_id"}


def _describe(group: Group) -> str:
    ups, downs = (
        ", ".join(inside(n, group.owner) for n in names) for names in (group.ups, group.downs)
    )
    return numberless(f"{numberless(group.owner) or 'the model'!s}: {ups} -> {downs}")


def _with_whole_inputs(style: Style, prepared: bool) -> Style:
    """Returns ``style`` without its splits of the sequence, so that its module can be compared with the plain
    one on whole inputs. Raises NotProven if the style can't do without. ``prepared``: whether the comparison
    includes the ``PrepareInput`` that prepares the module's input."""
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
        return replace(style, layout="replicate", keywords=tuple(name for name, _ in style.named))
    if style.takes_parts or style.splits_sequence:
        raise NotProven(f"{style} needs parts of a sequence")
    return style


# Functions that aren't elementwise.
_MIXING = re.compile(
    "view|reshape|unflatten|rearrange|einsum|softmax|log_softmax|split|chunk|transpose|permute|matmul|bmm|baddbmm|"
    "scaled_dot_product_attention|split_with_sizes|unbind|view_as|reshape_as|mean|sum|norm|var|std|cumsum|sort|"
    "topk|layer_norm|rms_norm|group_norm|normalize|roll|flip|conv1d|max|min|tensor_split"
)


@functools.cache
def _mixes(cls: type) -> bool:
    """Whether the class's source calls an operation that isn't elementwise; True if there is no source."""
    trees = method_trees(cls)
    if trees is None:
        return True
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.BinOp(op=ast.MatMult()):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"))):
                pass  # a child or a method
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                if _MIXING.fullmatch(name):
                    return True
    return False
