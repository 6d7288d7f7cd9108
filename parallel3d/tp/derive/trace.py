"""Running a model once, to see which linear layers read which others.

The model is a copy without weights: linear layers and embeddings put out random numbers instead of
computing, so that a trace of any model takes little time and memory. Every tensor has *sources*: the
layers it was computed from since. They are kept by storage, so that views and in-place operations are seen.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._compat import TorchDispatchMode
from parallel3d._tree import map_tensors, tensors_in
from parallel3d.tp.derive.skeleton import copy_with, weightless

__all__ = ["INPUT", "OUTPUT", "Call", "Flow", "Layer", "trace"]

INPUT, OUTPUT = "(the model's input)", "the model's output"


@dataclass(frozen=True)
class Layer:
    """A module that the trace doesn't look into.

    Attributes:
        kind: ``"linear"``, ``"embedding"``, ``"attention"`` (``nn.MultiheadAttention``) or ``"norm"``: puts
            out what has the sizes of its input.
        features: of what it puts out; of a norm 0.
    """

    kind: str
    features: int


@dataclass
class Call:
    """The first call of a module.

    Attributes:
        args, kwargs: as given, tensors copied.
        computed: ids of those tensors among them that depend on what weights compute, or are the model's
            own input; others (masks, positions) are the same whatever the weights.
        outputs: the sources of each tensor of the output.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    computed: set[int]
    outputs: list[frozenset[str]] = field(default_factory=list)


@dataclass
class Flow:
    """What a trace saw.

    Attributes:
        reads: layer, or ``OUTPUT`` -> the layers whose outputs reached it.
        inputs: layer -> numbers that are equal where layers read the very same tensor.
        passes: layer -> operations its output went through.
        mixes: layer -> the first of them that isn't one of each element by itself, so that what it does to
            a part of the features may be something else.
        cuts: layer -> how its output's last dim was cut: sizes of sections.
        calls: module -> its first call, of modules that aren't layers, and of attention.
        read_directly: parameter -> the operation that read it outside its module.
    """

    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    passes: dict[str, dict[str, None]] = field(default_factory=dict)
    mixes: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    read_directly: dict[str, str] = field(default_factory=dict)

    def readers(self, layer: str) -> list[str]:
        """Who reads the output of ``layer``, in the order in which they ran."""
        return [name for name, sources in self.reads.items() if layer in sources]


def trace(
    model: nn.Module, layers: dict[str, Layer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Flow:
    """Runs a weightless copy of ``model`` on ``args`` and ``kwargs``.

    Args:
        layers: module path -> what it is; the trace doesn't look into these.
    """
    copied = copy_with(model, weightless).eval()
    for module in copied.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _single(buffer)
    args, kwargs = map_tensors(_single, (args, kwargs))
    recorder = _Recorder(copied)
    for name, module in copied.named_modules():
        if name in layers:
            recorder.replace(name, module, layers[name])
        elif not any(name.startswith(f"{layer}.") for layer in layers):
            recorder.watch(name, module)
    for tensor in tensors_in((args, kwargs)):
        recorder.give(tensor, frozenset({INPUT}))
    # With gradients on, torch's own modules don't take their way for inference.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), recorder:
        torch.manual_seed(0)
        output = copied(*args, **kwargs)
    recorder.flow.reads[OUTPUT] = recorder.of_all(output)
    return recorder.flow


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flow = Flow()
        self._sources: dict[int, frozenset[str]] = {}
        self._kept: list[Any] = []  # a freed storage's address would be another's
        self._params = {_place(p): name for name, p in model.named_parameters()}
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        read = list(tensors_in((args, list(kwargs.values()))))
        sources = self.of_all(read)
        for tensor in read:
            if (param := self._params.get(_place(tensor))) is not None:
                self.flow.read_directly.setdefault(param, name)
        mixes = torch.Tag.pointwise not in func.tags and name not in _COPIES
        for source in sources:
            self.flow.passes.setdefault(source, {})[name] = None
            if mixes:
                self.flow.mixes.setdefault(source, name)
        made = list(tensors_in(result))
        if read and made:
            self._note_cut(name, read[0], made)
        for tensor in made:
            self.give(tensor, self.of(tensor) | sources)
        return result

    def _note_cut(self, name: str, whole: Tensor, parts: list[Tensor]) -> None:
        """Sections that a layer's output, or a view of it with its last dim whole, is cut into."""
        layer = self._direct.get(_place(whole))
        if layer is None or layer in self.flow.cuts or whole.dim() == 0:
            return
        if name in ("split", "split_with_sizes", "chunk", "unsafe_split", "tensor_split"):
            sizes = tuple(part.shape[-1] for part in parts)
            if len(sizes) > 1 and sum(sizes) == whole.shape[-1] == self._features[layer]:
                self.flow.cuts[layer] = sizes

    # ---- modules ----

    def replace(self, name: str, module: Any, layer: Layer) -> None:
        """Gives a layer of the copy a forward that notes what it reads."""
        self._features[name] = layer.features

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in((args, kwargs)))
            first = tensors[0]
            sources = self.of_all(tensors)
            if layer.kind == "attention":
                self.flow.calls.setdefault(name, self._call(args, kwargs))
            shape = first.shape if layer.kind == "embedding" else first.shape[:-1]
            output = torch.randn((*shape, layer.features or first.shape[-1]))
            if torch.is_grad_enabled():  # needs gradients, as it does with weights, and is no leaf
                output = output.requires_grad_().clone()
            self.flow.reads[name] = self.flow.reads.get(name, frozenset()) | sources
            self.flow.inputs.setdefault(name, _place(first))
            self.give(output, frozenset({name}))
            self._direct[_place(output)] = name
            if layer.kind == "attention":
                # Nobody is known to read the weights: they are compared, if they're put out.
                wants = kwargs.get("need_weights", args[4] if len(args) > 4 else True)
                self.flow.calls[name].outputs = [frozenset({name})] * (2 if wants else 1)
                return output, output.new_zeros(()) if wants else None
            return output

        module.forward = forward

    def watch(self, name: str, module: nn.Module) -> None:
        """Notes the module's first call."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.flow.calls:
                self.flow.calls[name] = self._call(args, kwargs)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self.flow.calls[name]
            if not call.outputs:
                call.outputs = [self.of(t) for t in tensors_in(output)]

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        copies: dict[int, Tensor] = {}
        computed: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = made = tensor.detach().clone()
                if self.of(tensor):
                    computed.add(id(made))
            return copies[id(tensor)]

        kept = map_tensors(note, (args, kwargs))
        self._kept.append((args, kwargs))
        return Call(kept[0], kept[1], computed)


_COPIES = {"detach", "clone", "alias", "_to_copy", "lift_fresh", "contiguous", "empty_like"}


def _single(tensor: Tensor) -> Tensor:
    """In float32, as the weights of the copy are, if it has numbers with a point at all."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _place(tensor: Tensor) -> int:
    """What tells a tensor's storage from others."""
    return tensor.untyped_storage().data_ptr()
