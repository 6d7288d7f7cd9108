"""Running a model once, to see which linear layers read which others.

The model is a copy without weights: linear layers and embeddings return random numbers instead of computing,
so that a trace of any model takes little time and memory. Every tensor has *sources*: the layers whose
outputs it was computed from without another layer in between. They are recorded by storage, so that views and
in-place operations are seen.
"""

import functools
import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._trace.copies import copy_with, map_once
from parallel3d._trace.record import Operations
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import PlanError
from parallel3d.tp.resolve import matches, numberless
from parallel3d.tp.styles import Colwise, Style
from parallel3d.tp.styles.base import is_embedding, linear_kind

INPUT, OUTPUT = "(the model's input)", "the model's output"


@dataclass(frozen=True)
class Layer:
    """A module that the trace runs as one operation. ``kind``: ``"linear"``, ``"embedding"``, ``"attention"``
    (``nn.MultiheadAttention``) or ``"norm"``; ``features``: the size of its output's last dim, 0 for a
    norm."""

    kind: str
    features: int


@dataclass
class FirstCall:
    """The arguments of a module's first call, with copies of the tensors. ``computed``: ids of the tensors
    among them that depend on weights or on the model's input (masks and positions don't); ``outputs``: for
    each tensor of the output, the layers that it was computed from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    computed: set[int]
    outputs: list[frozenset[str]] = field(default_factory=list)


@dataclass
class Trace:
    """What one forward recorded. Layers, modules and parameters are given by path.

    Attributes:
        reads: layer, or ``OUTPUT`` -> the layers whose outputs reach it without another layer in between.
        passes: layer -> the operations on its output.
        mixes: layer -> the first of these operations that isn't elementwise. On a part of the features it may
            compute something else.
        cuts: layer -> the sizes of the sections into which its output's last dim is cut.
        calls: module -> its first call, of modules that aren't layers, and of attention.
        read_directly: parameter -> the operation that reads it outside its module.
        uses: parameter that belongs to no layer -> layers whose outputs an operation combines with it.
    """

    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    passes: dict[str, dict[str, None]] = field(default_factory=dict)
    mixes: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: dict[str, FirstCall] = field(default_factory=dict)
    read_directly: dict[str, str] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=dict)

    def readers(self, layer: str) -> list[str]:
        """Returns the layers that read the output of ``layer``, in the order in which they ran."""
        return [name for name, sources in self.reads.items() if layer in sources]


def trace(
    model: nn.Module,
    layers: dict[str, Layer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    own_dtype: bool = False,
    path: str = "",
) -> Trace:
    """Runs a copy of ``model``, or of the module at ``path`` in it, without weights, and returns what it
    recorded. ``layers`` (path -> layer) run as one operation each. ``own_dtype``: parameters and inputs keep
    their dtypes, else they are float32."""

    def weightless(p: nn.Parameter) -> nn.Parameter:  # a number in a storage of its own, expanded
        number = torch.full((), 0.01, dtype=p.dtype if own_dtype else None)
        return nn.Parameter(number.expand(p.shape), p.requires_grad)

    copied = copy_with(model, weightless).eval()
    if not own_dtype:
        for module in copied.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _float32(buffer)
        args, kwargs = map_tensors(_float32, (args, kwargs))
    recorder = _Recorder(copied)
    for name, module in copied.named_modules():
        if name in layers:
            recorder.replace(name, module, layers[name])
        elif not any(name.startswith(f"{layer}.") for layer in layers):
            recorder.watch(name, module)
    for tensor in tensors_in((args, kwargs)):
        recorder.give(tensor, frozenset({INPUT}))
    watching = Operations(recorder.operation)
    # With gradients on, torch's own modules don't take their fast path for inference.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), watching:
        torch.manual_seed(0)
        output = copied.get_submodule(path)(*args, **kwargs)
    recorder.trace.reads[OUTPUT] = recorder.of_all(output)
    return recorder.trace


class _Recorder:
    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace()
        self._sources: dict[int, frozenset[str]] = {}
        self._kept: list[Any] = []  # so that no storage is freed and its address used again
        self._params = {_place(p): name for name, p in model.named_parameters()}
        self._made_of: dict[int, set[str]] = {}
        self._features: dict[str, int] = {}
        self._direct: dict[int, str] = {}  # output of a linear layer, by storage

    # ---- sources ----

    def of(self, tensor: Tensor) -> frozenset[str]:
        return self._sources.get(_place(tensor), frozenset())

    def of_all(self, tree: Any) -> frozenset[str]:
        return frozenset().union(*(self.of(t) for t in tensors_in(tree)))

    def give(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._kept.append(tensor)
        if tensor.numel():
            self._sources[_place(tensor)] = sources

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of torch; its results get the sources of all tensors that it reads."""
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        read = list(tensors_in((args, list(kwargs.values()))))
        sources = self.of_all(read)
        params: set[str] = set()  # of which alone a tensor is made
        for tensor in read:
            if (param := self._params.get(_place(tensor))) is not None:
                self.trace.read_directly.setdefault(param, name)
                params.add(param)
            params |= self._made_of.get(_place(tensor), set())
        for param in params if sources else ():
            self.trace.uses.setdefault(param, set()).update(sources)
        mixes = torch.Tag.pointwise not in func.tags and name not in _COPIES
        for source in sources:
            self.trace.passes.setdefault(source, {})[name] = None
            if mixes:
                self.trace.mixes.setdefault(source, name)
        made = list(tensors_in(result))
        # The sections into which a layer's output, or a view with its last dim, is cut.
        layer = self._direct.get(_place(read[0])) if read and name in _CUTS else None
        if layer is not None and layer not in self.trace.cuts and read[0].dim():
            sizes = tuple(part.shape[-1] for part in made)
            if len(sizes) > 1 and sum(sizes) == read[0].shape[-1] == self._features[layer]:
                self.trace.cuts[layer] = sizes
        for tensor in made:
            self.give(tensor, self.of(tensor) | sources)
            if params and not sources:
                self._made_of[_place(tensor)] = params
        return result

    # ---- modules ----

    def replace(self, name: str, module: Any, layer: Layer) -> None:
        """Makes a layer's forward record the sources of its input and return random numbers."""
        self._features[name] = layer.features

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in((args, kwargs)))
            first = tensors[0]
            sources = self.of_all(tensors)
            if layer.kind == "attention":
                self.trace.calls.setdefault(name, self._call(args, kwargs))
            shape = first.shape if layer.kind == "embedding" else first.shape[:-1]
            like = first if first.is_floating_point() else module.weight
            output = torch.randn((*shape, layer.features or first.shape[-1]), dtype=like.dtype)
            if torch.is_grad_enabled():  # as with weights: it requires gradients, and is no leaf
                output = output.requires_grad_().clone()
            self.trace.reads[name] = self.trace.reads.get(name, frozenset()) | sources
            self.give(output, frozenset({name}))
            self._direct[_place(output)] = name
            if layer.kind != "attention":
                return output
            # Attention weights, if returned, have no known reader: they are compared.
            wants = kwargs.get("need_weights", args[4] if len(args) > 4 else True)
            self.trace.calls[name].outputs = [frozenset({name})] * (2 if wants else 1)
            return output, output.new_zeros(()) if wants else None

        module.forward = forward

    def watch(self, name: str, module: nn.Module) -> None:
        """Adds hooks that record the arguments and output of the module's first call."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.trace.calls:
                self.trace.calls[name] = self._call(args, kwargs)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self.trace.calls[name]
            if not call.outputs:
                call.outputs = [self.of(t) for t in tensors_in(output)]

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstCall:
        computed: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            made = tensor.detach().clone()
            if self.of(tensor):
                computed.add(id(made))
            return made

        self._kept.append((args, kwargs))
        kept_args, kept_kwargs = map_once(note, (args, kwargs))
        return FirstCall(kept_args, kept_kwargs, computed)


_CUTS = {"split", "split_with_sizes", "chunk", "unsafe_split", "tensor_split"}
_COPIES = {"detach", "clone", "alias", "_to_copy", "lift_fresh", "contiguous", "empty_like"}


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _place(tensor: Tensor) -> int:
    """Returns the address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Returns path -> layer of the linear layers, embeddings and ``nn.MultiheadAttention`` in ``model``."""
    layers: dict[str, Layer] = {}
    attention: list[str] = []
    module: Any
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in attention):
            continue
        if isinstance(module, nn.MultiheadAttention):
            layers[name] = Layer("attention", module.embed_dim)
            attention.append(name)
        elif is_embedding(module):
            layers[name] = Layer("embedding", module.embedding_dim)
        else:
            with suppress(PlanError):
                layers[name] = Layer("linear", linear_kind(Colwise(), module).out_features)
    return layers


def with_patterns(
    styles: Mapping[str, Style], why: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, str | Style], dict[str, str]]:
    """Returns the rules and their reasons by pattern. Modules whose paths differ only in numbers share one
    rule with ``*``, if that pattern matches no module with another style."""
    rules: dict[str, str | Style] = {}
    reasons: dict[str, str] = {}

    @functools.cache
    def one_style(pattern: str) -> bool:
        alike = [styles.get(name) for name in modules if matches(pattern, name)]
        return len(alike) > 1 and all(style == alike[0] for style in alike)

    for name, style in styles.items():
        key = next(filter(one_style, (numberless(name), numberless(name, 1))), name)
        if key not in rules:
            rules[key], reasons[key] = style, why[name]
    return rules, reasons


def inside(name: str, owner: str) -> str:
    """Returns the path of the module ``name`` as seen from ``owner``, which it is in."""
    return name if not owner else name[len(owner) + 1 :]


def join(owner: str, name: str) -> str:
    """Returns the path in the model of the module ``name`` inside ``owner``; both may be ``""``."""
    return f"{owner}.{name}" if owner and name else owner or name


def common_path(paths: list[str]) -> str:
    """Returns the longest path that all ``paths`` begin with."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(
        column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, columns)
    )
