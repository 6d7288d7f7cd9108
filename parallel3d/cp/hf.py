"""Attention of transformers' models: registered functions for attention and masks.

A model's config names the attention function that its modules call. ``adopt`` gives the modules copies of
their configs with a name of ours. That name contains the plain model's, whose function is called if a rank
has whole sequences. Mask tensors are not created, as a rank has only a part of the positions: a ``LazyMask``
keeps the mask function, and attention evaluates it on positions of the whole sequence.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import untraced
from parallel3d._torch.simulated import value_here
from parallel3d._trace.copies import copy_with
from parallel3d._util.users_code import caller
from parallel3d.cp.attention import attention
from parallel3d.cp.batch import restarting
from parallel3d.cp.sequence import CpAxis, Sequence
from parallel3d.cp.state import CpState, Tracing, path_of, state_of
from parallel3d.errors import PlanError, StateError

_PREFIX = "parallel3d_cp_"


def is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and any(
        cls.__module__.startswith("transformers.") for cls in type(model).__mro__
    )


def adopt(model: nn.Module) -> None:
    """Makes modules of ``model`` whose config names an attention function call the functions of this file."""
    configs: dict[int, Any] = {
        id(m.config): m.config
        for m in model.modules()
        if getattr(getattr(m, "config", None), "_attn_implementation", None) is not None
    }
    memo: dict[int, Any] = {}
    ours = {key: copy.deepcopy(config, memo) for key, config in configs.items()}
    for key, config in ours.items():
        plain = configs[key]._attn_implementation
        if not plain.startswith(_PREFIX):
            config._attn_implementation_internal = _register(plain)
    for module in model.modules():
        own = ours.get(id(getattr(module, "config", None)))
        if own is not None:
            module.config = own


@functools.cache
def _register(plain: str) -> str:
    """Registers our attention and mask functions in transformers for models whose config names the function
    ``plain``; returns the name under which they are registered."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = _PREFIX + plain.replace("flash", "fl")  # transformers looks for "flash" in it
    AttentionInterface.register(name, functools.partial(_attention, plain))
    AttentionMaskInterface.register(name, functools.partial(_mask, plain))
    return name


# ---- masks ----


def masks_file() -> str:
    """Returns the path of transformers' code that makes masks; a trace leaves out the operations of this
    file, as mask tensors are not made."""
    from transformers import masking_utils

    return masking_utils.causal_mask_function.__code__.co_filename


class LazyMask:
    """Takes the place of a mask tensor of transformers, and keeps the function of positions that it would be
    made by.

    Args:
        plain: name of the attention function in the plain model.
        options: arguments that transformers passes to its function that creates masks.
    """

    def __init__(self, plain: str, options: dict[str, Any]) -> None:
        self.plain = plain
        self.options = options
        self._made: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyMask:
        return self

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("__"):
            _refuse_reading()
        raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        _refuse_reading()

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __eq__ = __getitem__
    __hash__ = object.__hash__

    @property
    def function(self) -> Callable[..., Any]:
        """The mask function: ``(batch, head, query, key) -> bool`` on positions."""
        from transformers.masking_utils import causal_mask_function

        return self.options.get("mask_function", causal_mask_function)

    def make(self) -> Any:
        """Returns the mask tensor of the plain model, for a rank that has whole sequences."""
        if not self._made:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

            self._made.append(ALL_MASK_ATTENTION_FUNCTIONS[self.plain](**self.options))
        return self._made[0]

    def rules(self) -> MaskRules:
        """Returns the mask as arguments of ``cp.attention``; PlanError if it is made of tensors, which would
        be of this rank's part of the sequence."""
        from transformers import masking_utils as hf

        function = self.function
        if function is hf.causal_mask_function:
            return MaskRules(True)
        if function is hf.bidirectional_mask_function:
            return MaskRules(False)
        parts = _and_parts(function)
        kinds = [_kind(part) for part in parts]
        if len(parts) == 2:
            numbers = dict(kinds)
            window = numbers.get("sliding_window_overlay")
            both = numbers.get("sliding_window_bidirectional_overlay")
            if window is not None and hf.causal_mask_function in parts:
                return MaskRules(True, window)
            if both is not None and hf.bidirectional_mask_function in parts:
                return MaskRules(False, (both, both))
        if self.options.get("use_vmap") or any(t.dim() > 1 for t in _tensors_of(function)):
            raise PlanError(
                "context parallelism: the model makes a mask from tensors of its part of the sequence "
                "(packed documents, blocks of images, a mask function of its own); give documents to "
                "p3d.cp.shard_batch as seq_lens or position_ids"
            )
        chunked = any(name == "chunked_overlay" for name, _ in kinds)
        return MaskRules(hf.causal_mask_function in parts, None, function, chunked)


def _refuse_reading() -> NoReturn:
    raise PlanError(
        f"context parallelism: the model's code reads the mask of attention ({caller()}), which is not made, "
        "since a rank has only a part of every sequence: sparse attention with an index of its own, and "
        "masks that depend on values, are not supported; use cp=1"
    )


@dataclass(frozen=True)
class MaskRules:
    """A mask as ``cp.attention`` takes it: ``causal``, ``window`` and, for any other mask, ``function`` (its
    ``mask_function``). ``chunked``: whether it is one of chunks of the sequence."""

    causal: bool
    window: int | tuple[int, int] | None = None
    function: Callable[..., Any] | None = None
    chunked: bool = False


def _mask(plain: str, *args: Any, **options: Any) -> LazyMask:
    names = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")
    return LazyMask(plain, {**dict(zip(names, args, strict=False)), **options})


def _and_parts(function: Any) -> tuple[Any, ...]:
    """Returns the functions that ``function`` joins (transformers' ``and_masks``), or the function itself."""
    if getattr(function, "__qualname__", "").startswith("and_masks."):
        inner = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
        return tuple(part for each in inner for part in _and_parts(each))
    return (function,)


def _kind(function: Any) -> tuple[str, Any]:
    """Returns the name of the transformers function that made this mask function, and the int that it was
    given (a window)."""
    name = getattr(function, "__qualname__", "").partition(".")[0]
    closure = getattr(function, "__closure__", None) or ()
    return name, next((c.cell_contents for c in closure if isinstance(c.cell_contents, int)), None)


def _tensors_of(function: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Returns the tensors in the closure of ``function``, and in those of functions there."""
    seen = set() if seen is None else seen
    found: list[Tensor] = []
    values: list[Any] = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
    if isinstance(function, functools.partial):
        values += [function.func, *function.args, *function.keywords.values()]
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            values += value
        elif callable(value):
            found += _tensors_of(value, seen)
    return found


# ---- attention ----

# Arguments of attention functions that don't change its result.
_HARMLESS = (
    *("sliding_window", "position_ids", "use_cache", "output_attentions", "cache_position"),
    *("output_hidden_states", "past_key_values", "num_items_in_batch", "output_router_logits"),
    *("return_dict", "deterministic", "logits_to_keep", "shift_labels", "is_causal"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "softcap", "s_aux"),
)


class HfCall(NamedTuple):
    """The arguments of a call of transformers' attention function, which is named ``plain``."""

    plain: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    dropout: float
    scaling: float | None
    kwargs: dict[str, Any]


def _attention(
    plain: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls: (batch, heads, length, size) -> (batch, length, heads, size)."""
    state = state_of(module)
    call = HfCall(plain, module, query, key, value, attention_mask, dropout, scaling, kwargs)
    if isinstance(state, Tracing):
        return _traced(state, call), None
    return _run(state, call)


@untraced
def _run(state: CpState | None, call: HfCall) -> tuple[Tensor, Tensor | None]:
    plain, module, query, key, value, mask, dropout, scaling, kwargs = call
    batch = None if state is None else state.running(query, key, value)
    if state is None or batch is None or batch.sequence is None:
        mask = mask.make() if isinstance(mask, LazyMask) else mask
        function = plain_attention(plain, module)
        return function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if key.shape[2] != query.shape[2]:
        raise StateError(
            f"attention has {query.shape[2]} queries and {key.shape[2]} keys: a cache of keys and values "
            "holds tokens; call with use_cache=False, or with whole sequences in eval mode"
        )
    rules, key_mask = _mask_rules(call)
    sees = rules.function
    if sees is not None and batch.sequence.documents is not None:
        sees = _within_documents(sees, restarting(batch.sequence.documents))
    options: dict[str, Any] = {"causal": rules.causal, "window": rules.window, "key_mask": key_mask}
    options |= {"mask_function": sees, "scale": scaling, "dropout_p": dropout}
    options |= {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    output = state.attend(path_of(module), batch, query, key, value, **options)
    return output.transpose(1, 2).contiguous(), None


def _within_documents(function: Callable[..., Any], places: Tensor) -> Callable[..., Any]:
    """Returns ``function`` called with positions in their documents (``places``, (batch, padded)) instead of
    positions in the sequence, as transformers calls it for packed documents."""

    def asked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        at = value_here(places)
        return function(batch, head, at[batch, query], at[batch, key])

    return asked


def _mask_rules(call: HfCall) -> tuple[MaskRules, Tensor | None]:
    """Returns the mask of a call as :class:`MaskRules`, and as a (batch, keys) tensor of those that may be
    attended to (None: all). Raises PlanError for other masks."""
    mask, module = call.mask, call.module
    if isinstance(mask, LazyMask):
        return mask.rules(), None
    causal = False  # eager attention without a mask
    if call.plain != "eager":
        given = call.kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if given is None else given)
    if mask is None:
        return MaskRules(causal), None
    padding = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4
    if not padding or mask.shape[1:3] != (1, 1):
        shown = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise PlanError(
            f"context parallelism: attention of {type(module).__name__} gets a mask of shape {shown}, made "
            "from this rank's part of the sequence; only (batch, 1, 1, length) bool, which hides keys, is "
            "possible"
        )
    return MaskRules(causal), mask[:, 0, 0]


def plain_attention(plain: str, module: nn.Module) -> Callable[..., Any]:
    """Returns transformers' attention function ``plain``; ``"eager"``: the one in the module's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own: Any = next(
        (
            function
            for cls in type(module).__mro__
            if (function := vars(sys.modules[cls.__module__]).get("eager_attention_forward"))
        ),
        None,
    )
    if plain == "eager" and own is None:
        raise PlanError(f"{type(module).__module__} has no eager_attention_forward")
    return own if plain == "eager" else ALL_ATTENTION_FUNCTIONS[plain]


def _traced(state: Tracing, call: HfCall) -> Tensor:
    """Records a call of attention in the traced copy of a model, and adds a proof for its kind."""
    _, module, query, key, value, mask, _, scaling, kwargs = call
    for name, given in kwargs.items():
        if given is None or name in _HARMLESS:
            continue
        if isinstance(given, Tensor):
            raise PlanError(
                f"context parallelism: attention of {type(module).__name__} takes {name!r}, a tensor of "
                f"shape {tuple(given.shape)}, which is not supported"
            )
    if mask is not None and not isinstance(mask, (LazyMask, Tensor)):
        raise PlanError(
            f"context parallelism: attention of {type(module).__name__} gets a {type(mask).__name__} as mask"
        )
    tensor = mask if isinstance(mask, Tensor) else None
    rules = mask.rules() if isinstance(mask, LazyMask) else None
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    keep = {k: repr(v) for k, v in kwargs.items() if not isinstance(v, Tensor)}
    options = {"scaling": scaling, "kwargs": tuple(sorted(keep.items()))}
    sizes = (*query.shape[1::2], *key.shape[1::2], value.shape[-1])
    case = (type(module), sizes, rules and (rules.causal, rules.window), tuple(options.items()))
    if case not in state.proven:
        state.proven.add(case)
        state.proofs.append(functools.partial(_prove, call, rules))
    chunked = rules is not None and rules.chunked
    return state.recorder.attention(
        "hf", query, key, value, tensor, shape, chunked=chunked, **options
    )


def _prove(call: HfCall, rules: MaskRules | None) -> None:
    """Compares transformers' attention with ``cp.attention`` on random numbers; PlanError if they differ."""
    plain, module, scaling = call.plain, call.module, call.scaling
    generator = torch.Generator().manual_seed(0)

    def random(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def weights(p: nn.Parameter) -> nn.Parameter:  # a matrix is not read here
        one = torch.ones((), dtype=torch.float64).expand(p.shape)
        return nn.Parameter(random(p.shape) if p.dim() < 2 else one, requires_grad=False)

    copied = copy_with(module, weights).eval()
    names = {id(p): name for name, p in module.named_parameters()}

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in names:
            return copied.get_parameter(names[id(value)])
        return random(value.shape) if value.is_floating_point() else torch.zeros(value.shape).long()

    kwargs = {name: filled(value) for name, value in call.kwargs.items()}
    q, k, v = (random(x.shape) for x in (call.query, call.key, call.value))
    length = q.shape[2]
    places = torch.arange(length)
    queries, keys = places[:, None], places[None, :]
    as_said = rules or _mask_rules(call._replace(mask=None))[0]
    causal, window = as_said.causal, as_said.window  # without a mask there is no window
    seen = keys <= queries if causal else keys >= 0
    if window is not None:
        left, right = (window - 1, length) if isinstance(window, int) else window
        seen = seen & (keys >= queries - left) & (keys <= queries + right)
    mask: Any = None
    if rules is not None:
        mask = seen.expand(q.shape[0], 1, length, length)
        if plain == "eager":
            least = torch.finfo(q.dtype).min
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, least)
    name = type(module).__name__
    function = plain_attention("sdpa" if "fl" in plain else plain, copied)
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scaling}
    options |= {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux"), "kind": "gather"}
    try:
        want = function(copied, q, k, v, mask, dropout=0.0, scaling=scaling, **kwargs)[0]
        got = attention(q, k, v, _ONE_RANK, Sequence(length, 1), **options).transpose(1, 2)
        equal = want.shape == got.shape and float((want - got).abs().max()) <= 1e-4
    except Exception as error:
        raise PlanError(
            f"context parallelism: attention of {name} can't be compared with ours: {error}"
        ) from error
    if not equal:
        raise PlanError(
            f"context parallelism: attention of {name} ({plain}) computes something else than attention with "
            "masks, windows, caps and sinks, which is what p3d.cp.attention knows"
        )


class _OneRank(CpAxis):
    """A ``CpAxis`` of one rank, without a process group."""

    def __init__(self) -> None:
        self.size, self.rank, self.kind, self.sequence = 1, 0, "gather", None


_ONE_RANK = _OneRank()
