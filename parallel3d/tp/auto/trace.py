"""Running a model once, to see which linear layers read which others.

The model is a copy without weights: linear layers and embeddings return random numbers instead of
computing, so that a trace of any model takes little time and memory. Every tensor has *sources*: the
layers that it was computed from, back to the nearest layer. They are recorded by storage, so that views
and in-place operations are seen.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.fake import FakeTensor
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import PlanError
from parallel3d.tp.parts import left_by_forward
from parallel3d.tp.resolve import matches, numberless
from parallel3d.tp.styles import Colwise, Style
from parallel3d.tp.styles.base import is_embedding, linear_kind

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NotCopied(PlanError):
    """The model can't be copied; the message says why, and where."""


def copy_with(module: ModuleT, make: Callable[[nn.Parameter], nn.Parameter]) -> ModuleT:
    """Returns a copy of ``module`` on the CPU with ``make(p)`` in the place of each parameter ``p``; ties
    stay. Buffers, and tensors that are attributes, are copied; see ``_with_values`` for those without. Raises
    NotCopied."""
    memo: dict[int, object] = {id(param): make(param) for param in module.parameters()}
    for _, owner, name in left_by_forward(module):  # which torch can't copy
        memo |= {id(t): t.detach().cpu() for t in tensors_in(vars(owner)[name]) if t.grad_fn}
    generator = torch.Generator().manual_seed(0)
    for each in module.modules():
        others = tensors_in([v for v in vars(each).values() if v is not each._parameters])
        for tensor in (*each._buffers.values(), *filter(_is_without_values, others)):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _with_values(tensor, generator)
    before = dict(memo)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NotCopied(_why_not_copied(module, before, error)) from error


def _why_not_copied(module: nn.Module, memo: dict[int, object], error: Exception) -> str:
    """Names the attribute that can't be copied, with ``error`` or, of a tensor with a graph, what to do."""
    first = (str(error).strip().splitlines() or [""])[0]
    why = f"{type(error).__name__}: {first}"
    if "graph leaves" in first:
        why = (
            "it has a tensor that was computed from weights, with its graph, which torch can't copy; keep it "
            "detached, or delete it before parallelize"
        )
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            try:
                if name != "_modules":
                    copy.deepcopy(value, dict(memo))
            except Exception:
                return f"{join(path, name)} of {type(module).__name__} can't be copied: {why}"
    return f"{type(module).__name__} can't be copied: {why}"


def _is_without_values(tensor: Tensor) -> bool:
    """Whether it is on meta, or was made in a dry run."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _with_values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a copy on the CPU; of a tensor without values one with random numbers, or of ones."""
    tensor = next(inner_tensors(tensor))  # of simulated ranks the first one's
    if not _is_without_values(tensor):
        return tensor.detach().to("cpu", copy=True)
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def random_like(param: nn.Parameter, generator: torch.Generator) -> Tensor:
    """Returns a float64 tensor with the parameter's shape, scaled to keep activations near 1."""
    made = torch.empty(param.shape, dtype=torch.float64)
    if param.dim() < 2:
        return made.uniform_(0.5, 1.5, generator=generator)
    bound = (3.0 / max(param.shape[-1], 1)) ** 0.5
    return made.uniform_(-bound, bound, generator=generator)


def map_once(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``map_tensors`` that replaces all occurrences of a tensor by one tensor."""
    once: dict[int, Tensor] = {}

    def made(tensor: Tensor) -> Tensor:
        if id(tensor) not in once:
            once[id(tensor)] = fn(tensor)
        return once[id(tensor)]

    return map_tensors(made, tree)


INPUT, OUTPUT = "(the model's input)", "the model's output"


@dataclass(frozen=True)
class Layer:
    """A module that the trace runs as one operation: ``"linear"``, ``"embedding"``, ``"attention"``
    (``nn.MultiheadAttention``) or ``"norm"``. ``features`` is the last size of its output; of a norm 0."""

    kind: str
    features: int


@dataclass
class Call:
    """The first call of a module, with copies of tensors.

    Attributes:
        computed: ids of the tensors among the arguments that depend on weights or on the model's own input;
            others (masks, positions) are the same for all weights.
        outputs: the sources of each tensor of the output.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    computed: set[int]
    outputs: list[frozenset[str]] = field(default_factory=list)


@dataclass
class Trace:
    """The record of one forward.

    Attributes:
        reads: layer, or ``OUTPUT`` -> the layers whose outputs reach it.
        passes: layer -> the operations on its output.
        mixes: layer -> the first of them that isn't elementwise, which may compute something else on a part
            of the features.
        cuts: layer -> the sizes of the sections into which its output's last dim is cut.
        calls: module -> its first call, of modules that aren't layers, and of attention.
        read_directly: parameter -> the operation that reads it outside its module.
    """

    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    passes: dict[str, dict[str, None]] = field(default_factory=dict)
    mixes: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    read_directly: dict[str, str] = field(default_factory=dict)

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
) -> Trace:
    """Runs a copy of ``model`` without weights; ``layers``, path -> layer, run as one operation.

    With ``own_dtype`` weights, buffers and inputs have the dtypes that they have, else float32.
    """

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
    # With gradients on, torch's own modules don't take their fast path for inference.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), recorder:
        torch.manual_seed(0)
        output = copied(*args, **kwargs)
    recorder.trace.reads[OUTPUT] = recorder.of_all(output)
    return recorder.trace


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self._sources: dict[int, frozenset[str]] = {}
        self._kept: list[Any] = []  # so that no storage is freed and its address used again
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
                self.trace.read_directly.setdefault(param, name)
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
        return result

    # ---- modules ----

    def replace(self, name: str, module: Any, layer: Layer) -> None:
        """Gives a layer of the copy a forward that records what it reads."""
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
        """Records the module's first call."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.trace.calls:
                self.trace.calls[name] = self._call(args, kwargs)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self.trace.calls[name]
            if not call.outputs:
                call.outputs = [self.of(t) for t in tensors_in(output)]

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        computed: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            made = tensor.detach().clone()
            if self.of(tensor):
                computed.add(id(made))
            return made

        self._kept.append((args, kwargs))
        kept_args, kept_kwargs = map_once(note, (args, kwargs))
        return Call(kept_args, kept_kwargs, computed)


_CUTS = {"split", "split_with_sizes", "chunk", "unsafe_split", "tensor_split"}
_COPIES = {"detach", "clone", "alias", "_to_copy", "lift_fresh", "contiguous", "empty_like"}


def _float32(tensor: Tensor) -> Tensor:
    """Returns a floating-point tensor in float32, the dtype of the copy's weights."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _place(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors with one storage."""
    return tensor.untyped_storage().data_ptr()


Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""

_BATCH, _LENGTH = 2, 6


def check_example(example: Any) -> Example:
    """Returns the user's example on the CPU, with values; raises PlanError if it isn't ``(args, kwargs)``."""
    fits = isinstance(example, tuple) and len(example) == 2
    if not fits or not isinstance(example[0], tuple) or not isinstance(example[1], dict):
        raise PlanError(
            f"example is {type(example).__name__}; it must be (args, kwargs) for the model's forward: a "
            "tuple and a dict, such as ((input_ids,), {})"
        )
    generator = torch.Generator().manual_seed(0)
    args, kwargs = map_tensors(lambda t: _with_values(t, generator), example)
    return args, kwargs


_MOST_INPUTS = 48
"""How many inputs of other shapes are tried; large convolutional models have hundreds that don't fit."""


def examples(model: nn.Module) -> Iterator[Example]:
    """Yields inputs that may fit ``model``, the most likely first."""
    if hasattr(model, "dummy_inputs") and hasattr(model, "config"):
        yield from _hugging_face(model)
        return
    required = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tried: set[tuple[torch.Size, int]] = set()
    for tensor in _inputs_for(model):
        key = tensor.shape, -1 if tensor.is_floating_point() else int(tensor.max())
        if key not in tried:
            tried.add(key)
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            yield tuple(tensor.clone() for _ in required) or (tensor,), {}
        if len(tried) == _MOST_INPUTS:
            return


def _hugging_face(model: Any) -> Iterator[Example]:
    config, name = model.config, model.main_input_name
    extra = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        sizes = size if isinstance(size, (tuple, list)) else (size, size)
        yield (), {name: torch.randn(_BATCH, getattr(config, "num_channels", 3), *sizes)}
        return
    inputs = dict(model.dummy_inputs)
    if name == "input_ids" and getattr(config, "is_encoder_decoder", False):
        inputs.setdefault("decoder_input_ids", inputs["input_ids"].clone())
    yield (), {**inputs, **extra}
    yield (), inputs


def _inputs_for(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields token ids, features, images, sound or video, as the first module with weights reads them."""
    module: Any
    ids = torch.arange(_BATCH * _LENGTH).view(_BATCH, _LENGTH)
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if not own:
            continue
        if type(getattr(module, "num_embeddings", None)) is int:  # whatever its forward
            yield ids % module.num_embeddings
        elif isinstance(module, _CONVOLUTIONS):
            kernel = module.kernel_size
            for times in (1, 2, 3, 4, 5, 6, 7, 8, 14, 16, 28):
                yield torch.randn(_BATCH, module.in_channels, *(k * times for k in kernel))
            for size in (224, 32, 28, 64, 256, 384) if len(kernel) == 2 else ():
                yield torch.randn(_BATCH, module.in_channels, size, size)
        elif features := _features(module):
            yield torch.randn(_BATCH, _LENGTH, features)
            yield torch.randn(_BATCH, features)
        else:  # its own embedding, perhaps
            yield from (ids % param.shape[0] for param in own if param.dim() == 2 and param.numel())


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _features(module: Any) -> int | None:
    """Returns the size of the last dim that a linear layer, a norm or attention reads."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    if isinstance(module, nn.Linear):
        return module.in_features
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) == 1:
        return int(shape[0])
    return int(module.nx) if hasattr(module, "nx") else None


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Returns the linear layers, embeddings and torch's attention in ``model``, by path."""
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
    """Returns the rules and their reasons; modules that differ only in numbers have one rule, where it
    matches no other module."""
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
    """Returns the path from ``owner`` of the module ``name`` inside it."""
    return name if not owner else name[len(owner) + 1 :]


def join(owner: str, name: str) -> str:
    """Returns the path of ``name`` inside ``owner``; each may be ``""``."""
    return f"{owner}.{name}" if owner and name else owner or name


def common_path(paths: list[str]) -> str:
    """Returns the innermost path around ``paths``, or the one that they all are."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(
        column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, columns)
    )


def describe(example: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """Returns shapes and dtypes of an example's tensors, and its other values or their types."""

    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(show, value))})"
        shown = isinstance(value, (int, float, str, type(None)))
        return repr(value) if shown else type(value).__name__

    args, kwargs = example
    return ", ".join([*map(show, args), *(f"{k}={show(v)}" for k, v in kwargs.items())])
