"""What context parallelism does to a model: its attention is found, checked to be all that mixes positions,
and replaced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn import functional as F
from torch.utils import checkpoint

from parallel3d._torch.autograd import untraced
from parallel3d._torch.simulated import simulation_off
from parallel3d._trace.examples import check_example, describe, examples
from parallel3d._trace.record import (
    AttentionCall,
    ForwardProgram,
    ProgramRecorder,
    Sdpa,
    instead_of,
    record,
)
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.cp import hf, mixing
from parallel3d.cp.batch import IGNORED, Batch
from parallel3d.cp.sequence import CpAxis, Kind
from parallel3d.cp.state import (
    Checked,
    CpState,
    Tracing,
    input_names,
    named_arguments,
    path_of,
    set_state,
    state_of,
)
from parallel3d.errors import Parallel3dError, PlanError
from parallel3d.tp.resolve import numberless

KINDS = ("auto", "ulysses", "gather", "ring")


@dataclass(frozen=True)
class ContextParallel:
    """How a model is made context-parallel: ``parallelize(context_parallel=ContextParallel(...))``.

    Attributes:
        kind: how attention communicates: ``"ulysses"``, ``"gather"`` (of keys and values), ``"ring"``, or
            ``"auto"``, which picks by heads, length and bytes; ``p3d.cp.summary(model)`` says what and why.
        position_wise: names of modules (with wildcards) that compute each position of a sequence from that
            position alone. This is not checked. ``""`` is the whole model except for attention.
    """

    kind: Kind | Literal["auto"] = "auto"
    position_wise: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Parallel3dError(
                f"context_parallel: kind is {self.kind!r}; it must be one of {', '.join(map(repr, KINDS))}"
            )
        if isinstance(self.position_wise, str):
            raise Parallel3dError(
                f"context_parallel: position_wise is {self.position_wise!r}; it must be a tuple of names"
            )


def check_options(options: object) -> ContextParallel:
    """Returns the options of ``parallelize(context_parallel=...)``; Parallel3dError for other values."""
    if options is None:
        return ContextParallel()
    if isinstance(options, str):
        return ContextParallel(options)  # type: ignore[arg-type]
    if not isinstance(options, ContextParallel):
        raise Parallel3dError(
            f"context_parallel is {options!r}; it must be None, one of {', '.join(map(repr, KINDS))}, or a "
            "p3d.cp.ContextParallel"
        )
    return options


@dataclass(frozen=True)
class CpPlan:
    """How a model is to be made context-parallel.

    Attributes:
        attention: path of a module -> the calls of attention in its forward.
        checked: the arguments with which the model was traced and checked.
        counts: whether the model calls ``p3d.cp.positions``.
    """

    options: ContextParallel
    attention: dict[str, list[AttentionCall]]
    checked: Checked
    counts: bool = False

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Replaces the attention of ``model``, in place, by that of all ranks of ``mesh``, the cp axis, and
        adds hooks that find each forward's batch."""
        chunked = any(c.options.get("chunked") for calls in self.attention.values() for c in calls)
        any_parts = not (self.attention or self.counts)
        axis, planned = CpAxis(mesh, self.options.kind), frozenset(self.attention)
        state = CpState(axis, self.checked, planned, any_parts, chunked)
        set_state(model, state)
        kinds = {path: calls[0].kind for path, calls in self.attention.items()}
        if "hf" in kinds.values():
            hf.adopt(model)
        for path, kind in kinds.items():
            module = model.get_submodule(path)
            if kind == "sdpa":
                wrap_forward(module, _with_sdpa, "context parallel")
            elif kind == "mha":
                wrap_forward(module, _with_mha, "context parallel")
                # So that torch's encoder layers call it in inference too.
                module.register_forward_pre_hook(_no_fast_path)
        model.register_forward_pre_hook(state.before, prepend=True, with_kwargs=True)
        model.register_forward_hook(state.after, always_call=True)


def _no_fast_path(module: nn.Module, args: Any) -> None:
    pass


def plan_cp(model: nn.Module, options: ContextParallel, example: Any = None) -> CpPlan:
    """Traces ``model`` on the meta device, and returns its attention; the model is not changed. ``example``:
    ``(args, kwargs)`` of a small batch for the model's forward, whose sequences are dim 1.

    Raises:
        PlanError: something else than attention mixes positions, or may do so, or the model can't be run on
            meta.
    """
    for pattern in options.position_wise:
        if not any(fnmatchcase(path, pattern) for path, _ in model.named_modules()):
            raise PlanError(f"context_parallel: position_wise {pattern!r} matches no module")
    first_error: Exception | None = None
    tried = None
    for number, pair in enumerate(_examples(model, example)):
        try:
            programs, tracings = zip(*(_run(model, options, *each) for each in pair), strict=True)
        except PlanError:
            raise
        except Exception as error:
            first_error = first_error or error
            tried = tried or pair[0]
            if number == 40:
                break
            continue
        lengths = (_length_of(pair[0]), _length_of(pair[1]))
        if "" not in options.position_wise:
            mixing.check(programs[0], programs[1], lengths)
        with simulation_off():
            for proof in tracings[0].proofs:
                proof()
        calls = programs[0].attention
        for path, each in calls.items():
            if len({call.kind for call in each}) > 1:
                raise PlanError(
                    f"{path!r} calls several kinds of attention, which is not supported"
                )
        return CpPlan(options, calls, _checked(model, pair[0], programs[0]), tracings[0].counts)
    where = f" with {describe(tried)}" if tried is not None else ""
    raise PlanError(
        f"context parallelism: the model could not be run on the meta device{where}, which shows whether "
        f"anything but attention mixes positions: {first_error}. Give parallelize an example of its "
        "forward, checks=Checks(example=(args, kwargs)), name what it can't run in context_parallel="
        "p3d.cp.ContextParallel(position_wise=...), or use cp=1"
    ) from first_error


def _checked(model: nn.Module, example: Any, program: ForwardProgram) -> Checked:
    names = input_names(model, *example)
    read = {ref.storage for op in program.ops for ref in mixing.refs_in(op.args)}
    needed = {name for name, ref in zip(names, program.inputs, strict=True) if ref.storage in read}
    if _is_text(model):  # without a mask it looks for packed documents in its part of the positions
        needed |= {"attention_mask"} & set(names)
    return Checked(
        frozenset(names), frozenset(needed), dict(named_arguments(model, *example)), _is_text(model)
    )


# ---- one run ----


def _run(
    model: nn.Module, options: ContextParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ForwardProgram, Tracing]:
    made: list[Tracing] = []

    def prepare(twin: nn.Module, recorder: ProgramRecorder) -> None:
        tracing = Tracing(recorder)
        made.append(tracing)
        set_state(twin, tracing)
        recorder.instead[F.scaled_dot_product_attention] = partial(_traced_sdpa, recorder)
        recorder.instead[F.multi_head_attention_forward] = partial(_refused_mha, recorder)
        if hf.is_hugging_face(twin):
            hf.adopt(twin)
            recorder.quiet = hf.masks_file()
        for path, module in twin.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                module.forward = _traced_mha(module, recorder)  # type: ignore[method-assign]
            elif _is_position_wise(path, module, options):
                module.forward = _leaf(module, recorder)

    return record(model, prepare, args, kwargs), made[0]


def _is_position_wise(path: str, module: nn.Module, options: ContextParallel) -> bool:
    """Whether the user (``options.position_wise``), or the class, says that a module computes each position
    by itself; such modules are traced as one operation."""
    if path and any(fnmatchcase(path, pattern) for pattern in options.position_wise):
        return True
    known = type(module).__name__.endswith("Experts")  # transformers' names of a layer's experts
    return known and type(module).__module__.startswith("transformers.")


def _leaf(module: nn.Module, recorder: ProgramRecorder) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return recorder.leaf(lambda: inner(*args, **kwargs), (args, kwargs))

    return forward


def _traced_sdpa(recorder: ProgramRecorder, *args: Any, **kwargs: Any) -> Tensor:
    _check_not_recomputed_alone(recorder.where)
    q, k, v, mask, _, is_causal, scale, _ = Sdpa(*args, **kwargs)
    shape = (*q.shape[:-1], v.shape[-1])
    return recorder.attention("sdpa", q, k, v, mask, shape, is_causal=is_causal, scaling=scale)


def _refused_mha(recorder: ProgramRecorder, *args: Any, **kwargs: Any) -> Any:
    if recorder.is_paused:
        return F.multi_head_attention_forward(*args, **kwargs)
    raise PlanError(
        f"{recorder.where!r} calls F.multi_head_attention_forward: with context parallelism use "
        "nn.MultiheadAttention, or F.scaled_dot_product_attention"
    )


def _check_not_recomputed_alone(path: str) -> None:
    """Raises PlanError if attention is called in a function that is checkpointed inside the forward of the
    module at ``path``: its recomputation would not run that forward, which replaces attention."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._call_impl.__code__ or code.co_qualname.startswith("_with_sdpa"):
            return
        if code.co_filename == checkpoint.__file__:
            raise PlanError(
                f"context parallelism: {path!r} gives torch.utils.checkpoint a function that calls "
                "F.scaled_dot_product_attention. Its recomputation in backward would attend to this rank's "
                "part of the sequence only: checkpoint modules instead (the one that calls attention, or one "
                "around it), or use parallelize(activation_checkpointing=...)"
            )
        frame = frame.f_back  # type: ignore[assignment]


class Mha(NamedTuple):
    """The arguments of a call of an ``nn.MultiheadAttention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def _traced_mha(module: nn.MultiheadAttention, recorder: ProgramRecorder) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        call = Mha(*args, **kwargs)
        _check_mha(recorder.where, module, call)
        dims, shape = (1 if module.batch_first else 0,) * 3, tuple(call.query.shape)
        options: dict[str, Any] = {"dims": dims, "mask_is_causal": call.is_causal}
        return recorder.attention("mha", *call[:3], call.attn_mask, shape, **options), None

    return forward


def _check_mha(where: str, module: Any, call: Mha) -> None:
    why = ""
    if call.need_weights:
        why = "returns attention weights, of which a rank has a part only: call it with need_weights=False"
    elif not (call.query is call.key is call.value):
        why = "attends to another sequence: cross attention is not supported"
    elif call.query.dim() != 3:
        why = "has no batch: give it (batch, length, features)"
    elif module.bias_k is not None or module.add_zero_attn:
        why = "has add_bias_kv or add_zero_attn, which is not supported"
    if why:
        raise PlanError(f"context parallelism: {where!r} (nn.MultiheadAttention) {why}")


# ---- examples of two lengths ----

_LENGTHS = (8, 12)


def _examples(model: nn.Module, example: Any) -> Iterator[tuple[Any, Any]]:
    """Yields pairs of inputs, (args, kwargs), that may fit the model, with sequences of two lengths."""
    text = _is_text(model)
    if example is not None:
        args, kwargs = check_example(example)
        if text and "input_ids" in kwargs:  # with what shard_batch adds
            rows, length = kwargs["input_ids"].shape
            kwargs = {**_text(model, length, "labels" in kwargs, rows)[1], **kwargs}
        yield _stretched((args, kwargs))
        return
    if text:
        if getattr(model.config, "is_encoder_decoder", False):
            raise PlanError(
                "context parallelism: encoder-decoder models are not supported; use cp=1"
            )
        for labels in (True, False):
            yield tuple(_text(model, n, labels) for n in _LENGTHS)  # type: ignore[misc]
        return
    for each in examples(model):
        if all(t.dim() > 1 for t in tensors_in(each)):
            yield _stretched(each)


def _is_text(model: nn.Module) -> bool:
    return hf.is_hugging_face(model) and getattr(model, "main_input_name", "") == "input_ids"


def _text(
    model: Any, length: int, labels: bool, rows: int = 2
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) for a Hugging Face text model, of the kind that ``shard_batch`` makes."""
    ids = torch.ones((rows, length), dtype=torch.int64)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(length).expand(rows, -1),
        "use_cache": False,
    }
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    known = inspect.signature(inner.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if labels and "labels" in known:
        inputs |= {"labels": ids.clone(), "shift_labels": torch.full_like(ids, IGNORED)}
        inputs["num_items_in_batch"] = torch.ones(())
    return (), {k: v for k, v in inputs.items() if k in known or anything}


def _stretched(example: Any) -> tuple[Any, Any]:
    """Returns ``example``, and a copy whose sequences (dim 1 of each tensor) are twice as long."""
    length = _length_of(example)

    def longer(t: Tensor) -> Tensor:
        return torch.cat([t, t], 1) if t.dim() > 1 and t.shape[1] == length else t

    return example, map_tensors(longer, example)


def _length_of(example: Any) -> int:
    length = next((int(t.shape[1]) for t in tensors_in(example) if t.dim() > 1), None)
    if length is None:
        raise PlanError(
            f"context parallelism: the example ({describe(example)}) has no tensor (batch, length, ...)"
        )
    return length


# ---- forwards ----


def _attend(
    state: CpState, path: str, batch: Batch, key_mask: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Replaces ``F.scaled_dot_product_attention``, whose arguments are ``*args`` and ``**kwargs``, in the
    forward of the module at ``path``: attends to the keys of all ranks."""
    _check_not_recomputed_alone(path)
    query, key, value, mask, dropout_p, causal, scale, enable_gqa = Sdpa(*args, **kwargs)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape[1:-1] != (1, 1):
            raise PlanError(
                f"context parallelism: {path!r} gives a mask of shape {tuple(mask.shape)} and {mask.dtype} "
                "to F.scaled_dot_product_attention; a rank has only a part of every sequence: give "
                "is_causal=True, or a (batch, 1, 1, length) bool mask of padding"
            )
        key_mask = mask[:, 0, 0]
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise PlanError(
            f"{path!r}: {query.shape[1]} heads of queries and {key.shape[1]} of keys need enable_gqa=True"
        )
    options: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "dropout_p": dropout_p}
    return state.attend(path, batch, query, key, value, causal=causal, **options)


def _with_sdpa(inner: Callable[..., Any]) -> Callable[..., Any]:
    @untraced
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        assert isinstance(state, CpState)
        batch = state.running(args, kwargs)
        if batch.sequence is None:
            return inner(self, *args, **kwargs)
        attend = partial(_attend, state, path_of(self), batch, None)
        with instead_of(F.scaled_dot_product_attention, attend):
            return inner(self, *args, **kwargs)

    return untraced(as_if(forward, inner))


def _with_mha(inner: Callable[..., Any]) -> Callable[..., Any]:
    @untraced
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state, call, path = state_of(self), Mha(*args, **kwargs), path_of(self)
        assert isinstance(state, CpState)
        batch = state.running(*call[:3])
        if batch.sequence is None:
            return inner(self, *call)
        _check_mha(path, self, call)
        mask, padding, causal = call.attn_mask, call.key_padding_mask, call.is_causal
        if mask is not None and not causal:
            raise PlanError(
                f"context parallelism: {path!r} gets attn_mask {tuple(mask.shape)}, made from "
                "this rank's part of the sequence; give is_causal=True with it"
            )
        if padding is not None and padding.dtype != torch.bool:
            raise PlanError(
                f"context parallelism: {path!r} gets a key_padding_mask of {padding.dtype}, as torch's "
                "encoder layers make it; give the padding to p3d.cp.shard_batch(key_mask=...) instead"
            )
        key_mask = None if padding is None else ~padding
        if hasattr(self, "_parallel3d_tp"):  # heads are split over tp, by a forward of its own
            mask = call.query if causal else None  # is_causal needs one, which it doesn't read
            attend = partial(_attend, state, path, batch, key_mask)
            with instead_of(F.scaled_dot_product_attention, attend):
                return inner(self, *call[:3], None, False, mask, False, causal)
        x = call.query if self.batch_first else call.query.transpose(0, 1)
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = rearrange(qkv, "b s (qkv h d) -> qkv b h s d", qkv=3, h=self.num_heads)
        dropout = self.dropout if self.training else 0.0
        output = state.attend(
            path, batch, q, k, v, causal=causal, key_mask=key_mask, dropout_p=dropout
        )
        output = rearrange(output, "b h s d -> b s (h d)")
        output = F.linear(output, self.out_proj.weight, self.out_proj.bias)
        return output if self.batch_first else output.transpose(0, 1), None

    return untraced(as_if(forward, inner))


def summary(model: nn.Module) -> str:
    """Returns a text that says which kind of attention each module of ``model`` uses, and why; equal layers
    share a line. With ``"auto"`` it is known after a forward, since it depends on the length of the
    sequences."""
    state = state_of(model)
    if not isinstance(state, CpState):
        return "no context parallelism"
    if state.axis.kind != "auto":
        return f"cp={state.axis.size}: {state.axis.kind} for all attention, as asked for"
    if not state.made:
        return f"cp={state.axis.size}: chosen at the first forward, when the length is known"
    lines: dict[tuple[str, str], list[str]] = {}
    for path, made in state.made.items():
        name = numberless(path) or "the model"
        lines.setdefault((made.kind, made.reason), []).append(name)
    return "\n".join(
        f"cp={state.axis.size}: {kind} in {', '.join(dict.fromkeys(names))}: {reason}"
        for (kind, reason), names in lines.items()
    )
