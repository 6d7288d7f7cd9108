"""derive_plan: the tensor-parallel plan of a model that has none of its own.

A trace of the model shows groups of linear layers that may be split together; for each group, ways to split
it are tried until one computes the same as the plain module.
"""

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from parallel3d._torch.simulated import simulation_off
from parallel3d._trace.copies import NotCopied
from parallel3d._trace.examples import check_example, describe, examples
from parallel3d._util import dry_run
from parallel3d.errors import PlanError
from parallel3d.tp.auto.prove import NotEqual, Proof, Prover, cost
from parallel3d.tp.auto.trace import (
    INPUT,
    OUTPUT,
    FirstCall,
    Layer,
    Trace,
    common_path,
    find_layers,
    inside,
    join,
    trace,
    with_patterns,
)
from parallel3d.tp.parts import hooks_on_parts, refused_hook
from parallel3d.tp.resolve import PlanSource, is_in, numberless
from parallel3d.tp.styles import (
    Colwise,
    HeadArguments,
    LocalParams,
    LocalSizes,
    Replicated,
    Rowwise,
    SplitHeads,
    Style,
    VocabParallel,
)
from parallel3d.tp.styles.base import own_params


@dataclass(frozen=True)
class Group:
    """Linear layers that may be split together: ``ups`` by output features, ``downs`` by input features, as
    paths.

    The outputs of ``ups`` are read by ``downs`` and by no other layer. The group of a derived plan has one
    layer in ``downs``. ``owner`` is the innermost module around all of them whose forward is called.
    """

    owner: str
    ups: tuple[str, ...]
    downs: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        return self.ups + self.downs


def ends_of(group: Group) -> dict[str, bool]:
    """Returns the outer layers of a group, those not both in ``ups`` and in ``downs``: path from the owner ->
    whether the layer is in ``ups``."""
    both = set(group.ups) & set(group.downs)
    names = [name for name in group.members if name not in both]
    return {inside(name, group.owner): name in group.ups for name in names}


def find_groups(trace: Trace, layers: dict[str, Layer]) -> tuple[list[Group], dict[str, str]]:
    """Returns the groups, and for each linear layer that is in no group the reason why. Groups of more layers
    come first (q, k and v before the layer that computes their input), then those earlier in the model. A
    layer between two others is in two groups, of which only one may be split."""
    linear = [name for name in trace.reads if name in layers and layers[name].kind == "linear"]
    why_not: dict[str, str] = {}
    ups: dict[str, list[str]] = {}
    for name in linear:
        readers = trace.readers(name)
        if len(readers) == 1 and readers[0] in linear and readers[0] != name:
            ups.setdefault(readers[0], []).append(name)
        else:
            why_not[name] = _why_alone(readers)
    groups = [
        Group(owner, tuple(names), (down,))
        for down, names in ups.items()
        if (owner := owner_of([*names, down], trace)) is not None
    ]
    groups.sort(key=lambda group: (-len(group.ups), linear.index(group.ups[0])))
    grouped = {name for group in groups for name in group.members}
    return groups, {name: why for name, why in why_not.items() if name not in grouped}


def _why_alone(readers: list[str]) -> str:
    if not readers:
        return "nobody reads its output in the trace"
    if readers == [OUTPUT]:
        return "its output is the model's output"
    if len(readers) == 1:
        return f"its output is read by {readers[0]}, which is not a linear layer"
    shown = ", ".join(readers[:3]) + (", ..." if len(readers) > 3 else "")
    return f"its output is read by {len(readers)} ({shown}), not by one linear layer only"


def owner_of(names: list[str], trace: Trace) -> str | None:
    """Returns the path of the innermost module that contains all modules ``names`` and was called in the
    trace."""
    owner = common_path([name.rpartition(".")[0] for name in names])
    while owner and owner not in trace.calls:
        owner = owner.rpartition(".")[0]
    return owner if owner in trace.calls else None


def hook_between(owner: str, modules: Mapping[str, Any], trace: Trace) -> tuple[str, str] | None:
    """Returns (hook, path of its module) of a hook of a module inside ``owner`` that would see only this
    rank's part of a tensor; None if there is none."""
    inner = (name for name in modules if is_in(name, owner) and name != owner)
    hooks = ((hooks_on_parts(modules[n], True, True), n) for n in inner if n in trace.calls)
    return next((found for found in hooks if found[0]), None)


class Kinds:
    """Finds groups that are alike in modules and inputs, as those of all layers: one proof is enough."""

    def __init__(self, modules: Mapping[str, Any], trace: Trace) -> None:
        self._modules, self._trace = modules, trace
        self._varying: dict[tuple[type, str], bool] = {}

    def of(self, group: Group) -> Any:
        """Returns a key of the group: equal keys mean equal classes, attributes, shapes and inputs."""
        numbers = {int(part) for part in group.owner.split(".") if part.isdigit()}
        about = []
        for name, module in self._modules[group.owner].named_modules():
            plain = tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, str, bool, tuple))
                and not (type(value) is int and value in numbers and self._varies(module, key))
            )
            shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
            hooked = hooks_on_parts(module, True, True)
            about.append((name, type(module), repr(plain), shapes, hooked))
        call = self._trace.calls[group.owner]
        members = tuple(inside(name, group.owner) for name in group.members)
        return tuple(about), members, describe((call.args, call.kwargs))

    def _varies(self, module: nn.Module, key: str) -> bool:
        """Whether the attribute ``key`` differs between modules of this class, as a layer's number does."""
        kind = type(module)
        if (kind, key) not in self._varying:
            values = {repr(vars(m).get(key)) for m in self._modules.values() if type(m) is kind}
            self._varying[kind, key] = len(values) > 1
        return self._varying[kind, key]


_MOST_WAYS = 24  # a wrong one costs a forward of one block on each rank


def ways_to_split(
    group: Group, model: nn.Module, trace: Trace, layers: dict[str, Layer]
) -> Iterator[dict[str, Style]]:
    """Yields dicts (path in the model -> style) that split the group's layers, the most likely first. Most
    are wrong; the proof tells which is right."""
    modules = dict(model.named_modules())
    features: list[tuple[set[int], dict[str, Style]]] = []
    for cut in _cuts(group, trace, layers):
        sizes = {n for name, sections in cut.items() for n in (*sections, layers[name].features)}
        ups = {n: Colwise(packed=cut[n]) if len(cut[n]) > 1 else Colwise() for n in group.ups}
        features.append((sizes, {**ups, **dict.fromkeys(group.downs, Rowwise())}))
    for _, styles in features:
        yield styles
        for style in _head_arguments(modules[group.owner], trace.calls[group.owner]):
            yield {group.owner: style, **styles}
    local = (
        {**local_sizes, **styles}
        for sizes, styles in features
        for local_sizes in _local_sizes(group, modules, sizes)
    )
    yield from islice(local, _MOST_WAYS)


def _head_arguments(owner: nn.Module, call: FirstCall) -> Iterator[Style]:
    """Yields ``HeadArguments`` styles for the owner: they split those of its forward's arguments that may
    have one slice for each head, such as a position bias."""
    arguments = inspect.signature(owner.forward).bind(*call.args, **call.kwargs).arguments
    tensors = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2
    }
    for name, heads in vars(owner).items():
        if type(heads) is not int or heads < 2 or "head" not in name or "dim" in name:
            continue
        dims: dict[str, int] = {}
        for argument, value in tensors.items():
            # What depends on weights and has three dims is the hidden state.
            if id(value) not in call.computed or value.dim() > 3:
                fitting = [dim for dim in (0, 1) if value.shape[dim] % heads == 0]
                dims |= {argument: fitting[0]} if fitting else {}
        if dims:
            yield HeadArguments(heads, tuple(reversed(dims.items())))


def _cuts(
    group: Group, trace: Trace, layers: dict[str, Layer]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yields dicts: layer of ``ups`` -> sizes of the sections (q, k, v; gate, up) that its output features
    may consist of; () means that it has no sections."""
    seen = {name: trace.cuts.get(name, ()) for name in group.ups}
    plain: dict[str, tuple[int, ...]] = dict.fromkeys(group.ups, ())
    yield seen
    if any(seen.values()):
        yield plain
    for parts in (3, 2):
        sizes = {name: divmod(layers[name].features, parts) for name in group.ups}
        packed = {name: (size,) * parts for name, (size, rest) in sizes.items() if not rest}
        if packed and packed != seen:
            yield {**plain, **packed}


def _local_sizes(
    group: Group, modules: dict[str, Any], sizes: set[int]
) -> Iterator[dict[str, Style]]:
    """Yields dicts: module around the group's layers -> ``LocalSizes`` with names of its int attributes to
    divide by tp. Attributes that equal one of ``sizes``, sizes of split features, come first."""
    likely: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for path, module in modules.items():
        # The owner, and the modules between it and the group's layers.
        between = is_in(path, group.owner) and path not in group.members
        between = between and any(is_in(n, path) for n in group.members)
        for name, value in vars(module).items() if between else ():
            if type(value) is int and value > 1 and name not in _NEVER and not name.startswith("_"):
                fits = value in sizes or ("head" in name and "dim" not in name)
                (likely if fits else others).append((path, name))
    tries = [*combinations(likely, 1), *combinations(likely, 2)]
    tries += [tuple(likely)] if likely else []
    tries += [*combinations(likely + others, 1), *combinations(likely + others, 2)]
    for attributes in dict.fromkeys(tries):
        names: dict[str, tuple[str, ...]] = {}
        for path, name in attributes:
            names[path] = (*names.get(path, ()), name)
        yield {path: LocalSizes(own) for path, own in names.items()}


_NEVER = {"training", "layer_idx", "layer_id"}


def derive_plan(model: nn.Module, tp_size: int, example: Any = None) -> PlanSource:
    """Derives a plan for ``model`` by running it once, and proves it before it is returned.

    A copy without weights runs, which shows the linear layers whose outputs are read by one other linear
    layer and by nothing else: q, k and v by the output projection, gate and up by down. Such a group is split
    over ``tp`` if the module around it then computes the same: forward and gradients, with random weights in
    float64, on ``tp_size`` ranks that are threads of this process. What isn't proven stays whole, with the
    reason in the plan's notes. The vocabulary of the embedding, and of the head, is split too.

    Nothing depends on weights, time or the rank: all ranks derive the same plan. They needn't communicate,
    and a process group may exist. The arguments are those of :func:`auto_plan`.

    Raises:
        PlanError: the model can't be run, or no layer of it can be split; lists the reasons.
    """
    with default_settings():
        return _Derivation(model, tp_size, example).plan()


@contextmanager
def default_settings() -> Iterator[None]:
    """A context in which torch's default dtype, device, modes and seed are those of a new process, not the
    caller's, and operations compute numbers even in a dry run."""
    dtype = torch.get_default_dtype()
    with (
        simulation_off(),
        dry_run.real(),
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
    """The model raised on every input that was tried. ``tries`` has a line with the error for each input."""

    def __init__(self, message: str, tries: str) -> None:
        super().__init__(message)
        self.tries = tries


def run_once(
    model: nn.Module, layers: dict[str, Layer], example: Any = None, path: str = ""
) -> Trace:
    """Runs ``model``, or the module at ``path`` in it, once without weights, and returns the trace: which
    layers read which others. Raises DidNotRun, or NotCopied if the model can't be copied.

    Args:
        layers: path -> layer: the modules that the trace runs as one operation each.
        example: the input, (args, kwargs); by default guessed inputs are tried until one works.
    """
    inputs = (
        [check_example(example)]
        if example is not None
        else list(examples(model.get_submodule(path)))
    )
    # In the model's dtypes; in float32 what the CPU can't do in others.
    dtypes = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    ways = (False,) if dtypes <= {torch.float32} else (True, False)
    errors = []
    for (args, kwargs), own_dtype in product(inputs, ways):
        try:
            return trace(model, layers, args, kwargs, own_dtype=own_dtype, path=path)
        except NotCopied:  # whatever the input
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            errors.append(f"{describe((args, kwargs))}: {type(error).__name__}: {first}")
    tries = "".join(f"\n  - {error}" for error in list(dict.fromkeys(errors))[:4])
    on = "the example" if example is not None else "any input guessed"
    raise DidNotRun(f"did not on {on}", tries)


_MOST_PARAMETERS = 10**9  # a proof holds them and their gradients twice, in float64

# A proven group with its styles, or the reason why it can't be split.
_Proven = tuple[Group, dict[str, Style]] | str


class _Derivation:
    def __init__(self, model: nn.Module, tp: int, example: Any) -> None:
        self.model, self.tp = model, tp
        layers = find_layers(model)
        try:
            self.trace = run_once(model, layers, example)
        except NotCopied as error:
            raise PlanError(
                f"a plan for {type(model).__name__} can't be derived: {error}"
            ) from error
        except DidNotRun as error:
            names = list(inspect.signature(model.forward).parameters)
            taken = f"({', '.join(names[:8])}{', ...' * (len(names) > 8)})"
            raise PlanError(
                f"a plan for {type(model).__name__} can't be derived: the model must run once, and {error}. "
                f"Give parallelize checks=Checks(example=(args, kwargs)), or auto_plan the example: a small "
                f"batch of its forward{taken}{error.tries}"
            ) from None
        self.modules = dict(model.named_modules())
        self.layers = layers
        # By path: styles of modules that are split, the reasons for these, and why others are not.
        self.styles: dict[str, Style] = {}
        self.why: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._kinds = Kinds(self.modules, self.trace)
        self._equal = f"proven equal on {tp} ranks"

    def plan(self) -> PlanSource:
        groups, why_not = find_groups(self.trace, self.layers)
        self.refused.update(why_not)
        attention = [n for n in self.trace.reads if self._kind(n) == "attention"]
        proven: dict[Any, _Proven] = {}
        for group in [*(Group(name, (), (name,)) for name in attention), *groups]:
            if any(name in self.styles for name in group.members):
                continue  # one of its layers is split with others already
            key = self._kinds.of(group)
            if key not in proven:
                proven[key] = self._prove(group)
            self._accept(group, proven[key])
        self._vocabulary()
        own = self._with_own_forward()
        if not self.styles:
            listed = "".join(f"\n  - {note}" for note in self._notes())
            raise PlanError(
                f"no plan can be derived for {type(self.model).__name__} on {self.tp} tp ranks: nothing of "
                "it was proven to be the same when split"
                f"{listed or '; it has no linear layers that were called'}"
            )
        self._warn_of_whole(own)
        rules, why = with_patterns(self.styles, self.why, self.modules)
        return PlanSource(rules, why, tuple(self._notes()), "derived")

    def _warn_of_whole(self, own: list[str]) -> None:
        """Warns of layers that stay whole on every rank, with the reasons, if they hold many of the model's
        parameters or if ``own``, the layers with forwards of their own, has any."""
        layers = [n for n in self.layers if self._kind(n) in ("linear", "embedding")] + own
        whole = [name for name in layers if name not in self.styles and name in self.refused]
        params = {id(p): p.numel() for p in self.model.parameters()}
        held = {id(p): p.numel() for name in whole for p in self.modules[name].parameters(False)}
        share = sum(held.values()) / max(1, sum(params.values()))
        if (share < _MANY and not own) or (dist.is_initialized() and dist.get_rank()):
            return
        notes = "".join(f"\n  - {note.removeprefix(_WHOLE)}" for note in self._notes())
        warnings.warn(
            f'tp_plan="auto": {len(whole)} of the {len(layers)} linear layers and embeddings of '
            f"{type(self.model).__name__}, with {share:.0%} of its parameters, stay whole on every tp rank:"
            f"{notes}",
            stacklevel=2,
        )

    def _kind(self, name: str) -> str:
        return self.layers[name].kind if name in self.layers else ""

    def _prove(self, group: Group) -> _Proven:
        for path in (f"{name}.{own}" for name in group.members for own in ("weight", "bias")):
            if path in self.trace.read_directly:
                return f"{path} is read by {self.trace.read_directly[path]} outside its module"
        call, owner = self.trace.calls[group.owner], self.modules[group.owner]
        if (found := hook_between(group.owner, self.modules, self.trace)) is not None:
            return refused_hook(found[0], inside(found[1], group.owner))
        ends = ends_of(group)
        size = cost(owner, ends)
        if size > _MOST_PARAMETERS:
            return f"the module around them has {size} parameters, too many to prove anything of it"
        prover = Prover(owner, call, self.tp, frozenset(group.ups), ends=ends, attributes=True)
        errors: dict[str, str] = {}  # error -> the local sizes with which it was raised
        ways: Iterable[dict[str, Style]] = [{group.owner: SplitHeads()}]
        if self._kind(group.owner) != "attention":
            ways = ways_to_split(group, self.model, self.trace, self.layers)
        for way in ways:
            styles = {inside(name, group.owner): style for name, style in way.items()}
            try:
                extra = self._partial(owner, prover.prove(styles))
                if extra:
                    prover.prove({**styles, **extra})
                added = {join(group.owner, name): style for name, style in extra.items()}
                return group, {**way, **added}
            except (NotEqual, PlanError) as error:
                local = ((n, style) for n, style in styles.items() if isinstance(style, LocalSizes))
                sizes = ", ".join(join(n, size) for n, style in local for size in style.names)
                errors.setdefault(str(error), f"with {sizes} of a rank's part: " if sizes else "")
        first, *others = errors
        second = next((f"; {errors[error]}{error}" for error in others if errors[error]), "")
        return f"{first}{second}"

    def _partial(self, owner: nn.Module, proof: Proof) -> dict[str, Style]:
        """Returns styles that sum the gradients over tp for the modules whose parameters had partial sums as
        gradients in the proof. Raises NotEqual if that is so for only some parameters of a module."""
        modules = dict(owner.named_modules())
        styles: dict[str, Style] = {}
        for path in proof.partial:
            module = path.rpartition(".")[0]
            for name in (join(module, name) for name in own_params(modules[module])):
                if name not in proof.partial:
                    why = f"the gradient of {path} is a part on each rank, that of {name} isn't"
                    raise NotEqual(why)
            styles[module] = Replicated("partial")
        return styles

    def _accept(self, group: Group, proven: _Proven) -> None:
        """Records the result for ``group``: ``proven`` holds the styles of a group of the same kind, or the
        reason why it can't be split."""
        if isinstance(proven, str):
            if len(group.members) > 1:
                members = ", ".join(inside(name, group.owner) for name in group.members)
                proven = f"{members} of {group.owner or 'the model'} together: {proven}"
            for name in group.members:
                self.refused.setdefault(name, proven)
            return
        other, styles = proven
        for name, style in styles.items():
            own = join(group.owner, inside(name, other.owner))
            self.styles[own] = style
            self.why[own] = f"{self._reason(own, style, group)}; {self._equal}"
            self.refused.pop(own, None)

    def _reason(self, name: str, style: Style, group: Group) -> str:
        down = inside(group.downs[0], group.owner)
        if isinstance(style, SplitHeads):
            return f"{self.modules[name].num_heads} heads of their own weights"
        if name in group.downs:
            return f"reads {', '.join(inside(n, group.owner) for n in group.ups)} and nothing else split"
        if name in group.ups:
            passed = dict.fromkeys(op.strip("_") for op in self.trace.passes.get(name, {}))
            shown = [op for op in passed if not _UNINTERESTING.fullmatch(op)]
            way = ", ".join([*shown[:6], *(["..."] if len(shown) > 6 else [])])
            return f"its output reaches {down} only, through {way or 'nothing'}"
        if isinstance(style, Replicated):
            return f"used on each rank's part, on the way to {down}"
        if isinstance(style, HeadArguments):
            names = ", ".join(argument for argument, _ in style.arguments)
            return f"gets {names} for all heads, and has a part of them"
        return f"sizes its forward uses on the parts that {down} reads"

    def _fits(self, style: Style, name: str) -> bool:
        """Whether ``style`` can split the module at ``name``; if not, records the reason in ``refused``."""
        try:
            style.plan(self.modules[name], self.tp)
        except PlanError as error:
            self.refused[name] = str(error)
            return False
        return True

    def _vocabulary(self) -> None:
        """Splits the model's input embedding, modules tied to it, and output heads over the vocabulary. This
        needs no proof, since these modules take and return whole tensors, if no other module reads their
        parameters."""
        tables = [
            name
            for name, layer in self.layers.items()
            if layer.kind == "embedding" and INPUT in self.trace.reads.get(name, ())
        ]
        if not tables:
            return
        table = max(tables, key=lambda name: self.modules[name].num_embeddings)
        size, weight = self.modules[table].num_embeddings, self.modules[table].weight
        tied = [
            name
            for name, module in self.modules.items()
            if name != table and any(p is weight for p in module.parameters(recurse=False))
        ]
        if not self._fits(VocabParallel(), table):
            return
        op = self.trace.read_directly.get(f"{table}.weight")
        if op is not None and not tied:
            self.refused[table] = f"its weight is read by {op} outside its module"
            return
        heads = [
            name
            for name, layer in self.layers.items()
            if (layer.kind, layer.features) == ("linear", size)
            and name not in self.styles
            and self.trace.readers(name) == [OUTPUT]
            and self._fits(Colwise(output="replicate"), name)
        ]
        heads = [name for name in heads if self._split_shared(name)]
        others = [name for name in tied if name not in heads]
        for name in others:
            if self._kind(name) != "embedding":
                self.refused[table] = f"its weight is also {name}'s, which can't be split so"
                return
        for name in (table, *others):
            self.styles[name] = VocabParallel()
            self.why[name] = f"looks up the model's input in a vocabulary of {size}"
        for head in heads:
            self.styles[head] = Colwise(output="replicate")
            shared = ", tied to the embedding" if head in tied else ""
            self.why[head] = f"puts out the model's output over the vocabulary of {size}{shared}"
            self.refused.pop(head, None)

    def _with_own_forward(self) -> list[str]:
        """Returns the linear layers and embeddings whose class overrides forward in a way that can't be
        split, and records that reason."""
        own = [
            name
            for name, module in self.modules.items()
            if isinstance(module, (nn.Linear, nn.Embedding)) and name not in self.layers
            if name in self.trace.calls
        ]
        for name in own:
            kind = type(self.modules[name]).__qualname__
            self.refused[name] = (
                f"{kind} has a forward of its own, of which nothing is known; one that calls "
                "super().forward(x), or that is F.linear(x, self.weight.to(x.dtype)), can be split"
            )
        return own

    def _split_shared(self, head: str) -> bool:
        """Whether the head's parameters can be split although other modules hold them too. A module that only
        holds the bias and doesn't read it gets a rule that splits it the same way."""
        own = {id(p) for p in own_params(self.modules[head]).values()}
        for name, module in self.modules.items():
            layer = self.layers.get(name)
            if name == head or (layer is not None and layer.kind == "embedding"):
                continue
            params = own_params(module)
            shared = [n for n, p in params.items() if id(p) in own]
            if not shared:
                continue
            read = any(join(name, n) in self.trace.read_directly for n in shared)
            if layer is not None or read or shared != ["bias"] or len(params) > 1:
                self.refused[head] = f"its {shared[0]} is also {name}'s, which can't be split so"
                return False
            self.styles[name] = LocalParams((("bias", Colwise()),))
            self.why[name] = f"has the bias of {head}, which is split, and doesn't read it"
        return True

    def _notes(self) -> list[str]:
        """Returns a note for each reason why modules stay whole, with their names; ``*``: of all layers."""
        grouped: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            grouped.setdefault(re.sub(r"\.\d+\b", ".*", reason), []).append(name)
        notes = []
        for reason, names in grouped.items():
            shown = []
            for name in names:
                pattern = numberless(name)
                alike = {other for other in self.layers if numberless(other) == pattern}
                shown.append(pattern if alike <= set(names) else name)
            notes.append(f"{_WHOLE}{', '.join(dict.fromkeys(shown))}: {reason}")
        return notes


_WHOLE = "derived, left whole: "
_MANY = 0.2  # of a model's parameters: as many are worth a word if they stay whole
_UNINTERESTING = re.compile(r"detach|clone|alias|empty_like|new_zeros|copy|_?to_copy|sym_size")
