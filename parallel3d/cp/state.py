"""What the modules of a context-parallel model share: the axis, and the batch whose forward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import (
    before_changes,
    in_backward_pass,
    queue_backward_callback,
    untraced,
)
from parallel3d._trace.record import ProgramRecorder
from parallel3d._util.trees import tensors_in
from parallel3d.cp.attention import attention, chosen
from parallel3d.cp.batch import WHOLE, Batch, batch_of
from parallel3d.cp.choose import Choice
from parallel3d.cp.sequence import CpAxis
from parallel3d.errors import StateError
from parallel3d.tp.same_batch import check_whole

_ATTRIBUTE, _PATH = "_parallel3d_cp", "_parallel3d_cp_path"


@dataclass(frozen=True)
class Checked:
    """The arguments with which a model was traced to check that it doesn't mix positions.

    Attributes:
        inputs: names of the arguments that were, or had, tensors.
        needed: those of them that the model reads. Without one it may make its own, from its part.
        choices: name -> value of the other arguments.
        hugging_face: whether they were those that ``shard_batch`` gives to a model of transformers.
    """

    inputs: frozenset[str]
    needed: frozenset[str] = frozenset()
    choices: Mapping[str, Any] = field(default_factory=dict)
    hugging_face: bool = False


_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_HARMLESS = ("use_cache", "return_dict", "output_hidden_states", "output_attentions", *_LOSS)


@dataclass(eq=False)
class CpState:
    """The state of context parallelism of one model. All modules of the model refer to it.

    Attributes:
        axis: the axis cp.
        checked: the arguments with which the model was traced and checked.
        planned: paths of the modules whose attention was replaced.
        attended: paths of those that have called it since the model was made.
        any_parts: whether the model has no attention and asks for no positions, so that inputs may be cut in
            any way.
        chunked: whether a mask has chunks that begin after padding on the left, which is not supported.
        made: path of a module -> the kind that ``"auto"`` chose at its last call.
        forward: the batch whose forward runs.
        backward: the batch whose backward runs, in which blocks may be recomputed.
    """

    axis: CpAxis
    checked: Checked
    planned: frozenset[str]
    any_parts: bool
    chunked: bool
    attended: set[str] = field(default_factory=set)
    made: dict[str, Choice] = field(default_factory=dict)
    forward: Batch | None = None
    backward: Batch | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CpState:
        return CpState(self.axis, self.checked, self.planned, self.any_parts, self.chunked)

    def running(self, *inputs: Any) -> Batch:
        """Returns the batch whose forward or backward runs, ``WHOLE`` if every rank has all of it.

        Args:
            inputs: those of the module that asks. If it is called outside the model's forward, in an
                evaluation, they are compared over cp, because they must be whole sequences.

        Raises:
            StateError: the batch is not known, or the ranks have different inputs.
        """
        if self.forward is not None:
            return self.forward
        if in_backward_pass():
            if self.backward is None:
                raise StateError(
                    "attention is recomputed in a backward that did not begin at an output of the model, so "
                    "that it is not known which batch it belongs to: compute the loss from what the model's "
                    "forward has returned"
                )
            return self.backward
        if torch.is_grad_enabled():
            raise StateError(
                "a part of a context-parallel model was called outside the model's forward, with gradients: "
                "call the model that parallelize was given, on what p3d.cp.shard_batch has returned"
            )
        if inputs:
            check_whole(self.axis.mesh, list(tensors_in(inputs)), {})
        return WHOLE

    # ---- hooks of the root ----

    @untraced
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the model: finds the batch that the inputs belong to, and checks the inputs.
        StateError if they were not cut by ``shard_batch`` but must be."""
        batch = batch_of((args, kwargs))
        if batch is None:
            if module.training and torch.is_grad_enabled() and not self.any_parts:
                raise StateError(
                    f"the inputs are not from p3d.cp.shard_batch, and the mesh has cp={self.axis.size}: "
                    "write batch = p3d.cp.shard_batch(batch, mesh) right before the forward, after the batch "
                    "was moved to the device; or evaluate whole sequences in eval mode"
                )
            if not self.any_parts:
                check_whole(self.axis.mesh, args, kwargs)
            batch = WHOLE
        elif batch.sequence is not None and batch.sequence.size != self.axis.size:
            raise StateError(
                f"the batch was cut for cp={batch.sequence.size}, the model's mesh has cp={self.axis.size}"
            )
        if batch.sequence is not None:
            _check_all_cut(module, args, kwargs, batch.sequence.rows)
            self._check_inputs(module, args, kwargs)
        if self.chunked and batch.left_padded:
            raise StateError(
                "the model attends within chunks, which begin after padding on the left of a sequence: with "
                "context parallelism pad on the right"
            )
        self.forward = batch
        self.axis.sequence = batch.sequence

    def _check_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raises StateError for inputs with which the model may run other code than when it was checked."""
        checked = self.checked
        given = set(input_names(module, args, kwargs))
        new = given - checked.inputs
        if "input_ids" in checked.inputs:
            new.discard("inputs_embeds")
        names = ", ".join(map(repr, sorted(checked.inputs)))
        if new:
            raise StateError(
                f"the model gets {', '.join(map(repr, sorted(new)))}, and was checked with {names} only: "
                "what it does with the rest may mix positions. Give parallelize an example=(args, kwargs) "
                "with all of them"
            )
        missing = checked.needed - given
        if "inputs_embeds" in given:
            missing -= {"input_ids"}
        if checked.hugging_face and "labels" not in given:
            missing -= set(_LOSS)
        if missing:
            raise StateError(
                f"the model is called without {', '.join(map(repr, sorted(missing)))}, and was checked with "
                f"{names}: what it makes in their place is of this rank's part of the sequence. "
                + (
                    "Give the model all that p3d.cp.shard_batch returns for a dict: model(**batch)"
                    if checked.hugging_face
                    else "Give the model all of them, or parallelize an example=(args, kwargs) without them"
                )
            )
        if checked.hugging_face and "labels" in given and _LOSS[2] not in checked.needed:
            raise StateError(
                f"{type(module).__name__} doesn't read num_items_in_batch: its loss is the mean over the "
                "labels of this rank's part, which is not the batch's where ranks have other numbers of "
                "labels. Call it without labels, and compute the loss from the logits: the sum over labels / "
                "num_items_in_batch, or p3d.optim.global_mean"
            )
        known = inspect.signature(module.forward).parameters
        for name, value in named_arguments(module, args, kwargs):
            if not isinstance(value, (bool, str, int) if checked.hugging_face else (bool, str)):
                continue
            default = known[name].default if name in known else None
            expected = checked.choices.get(name, default)
            if name not in _HARMLESS and value != expected and (value or expected):
                raise StateError(
                    f"the model gets {name}={value!r}, and was checked with {expected!r}: what it does then "
                    "may mix positions. Give parallelize an example=(args, kwargs) with it"
                )

    @untraced
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: the forward has ended. Adds hooks to the outputs that note, at the first
        gradient, whose backward begins."""
        batch, self.forward = self.forward, None
        if batch is None or not torch.is_grad_enabled():
            return

        def begins(_: Tensor) -> None:
            if self.backward is None:
                queue_backward_callback(self._backward_ends)
            self.backward = batch
            self.axis.sequence = batch.sequence

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                before_changes(tensor).register_hook(begins)

    def _backward_ends(self) -> None:
        self.backward = None

    # ---- attention ----

    def attend(
        self,
        path: str,
        batch: Batch,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the attention of this rank's queries, (B, heads, rows, size), to the keys of all ranks.
        ``path``: the module that calls it; ``options``: further arguments of ``cp.attention``."""
        sequence = batch.sequence
        assert sequence is not None
        self.attended.add(path)
        if q.dim() == 4 and q.shape[2] != sequence.rows:
            raise StateError(
                f"attention has {q.shape[2]} positions, this rank's part of the sequences has "
                f"{sequence.rows}: all inputs of the model must be from p3d.cp.shard_batch"
            )
        if batch.key_mask is not None:
            key_mask = batch.key_mask if key_mask is None else key_mask & batch.key_mask
        kind = self.axis.kind
        if kind == "auto":
            choice = self.made[path] = chosen(q, k, self.axis, sequence, causal)
            kind = choice.kind
        return attention(
            q, k, v, self.axis, sequence, causal=causal, key_mask=key_mask, kind=kind, **options
        )


def _check_all_cut(module: nn.Module, args: Any, kwargs: Any, rows: int) -> None:
    """Raises StateError for an integer or bool input that is as long as this rank's part (``rows``) but not
    from ``shard_batch``: positions or masks that were made of the part."""
    for name, value in named_arguments(module, args, kwargs):
        for tensor in tensors_in(value):
            if tensor.is_floating_point() or batch_of(tensor) is not None:
                continue
            if rows in (tensor.shape[1:2] or tensor.shape):
                raise StateError(
                    f"{name!r}, of shape {tuple(tensor.shape)}, is as long as this rank's part of the "
                    f"sequences ({rows}) and not from p3d.cp.shard_batch: it was made of the part, or is a "
                    "copy. Make it of the whole sequence, and give it to shard_batch with the others"
                )


@dataclass(eq=False)
class Tracing:
    """The state of a model's traced copy, in the place of ``CpState``.

    Attributes:
        counts: whether the model has called ``p3d.cp.positions``.
        proofs: functions to call after the trace, one for each kind of attention call that it has met; each
            raises PlanError if that call computes something else than ``cp.attention``.
        proven: the kinds that ``proofs`` has a function for, so that none is added twice.
    """

    recorder: ProgramRecorder
    counts: bool = False
    proven: set[Any] = field(default_factory=set)
    proofs: list[Callable[[], None]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracing:
        return self


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Returns (name, value) of each argument of a forward that is called with ``args`` and ``kwargs``."""
    names = [name for name in inspect.signature(module.forward).parameters if name != "self"]
    positional = (names[i] if i < len(names) else f"argument {i}" for i in range(len(args)))
    return [*zip(positional, args, strict=True), *kwargs.items()]


def input_names(module: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Returns, for each tensor in the arguments of a forward, the name of the argument that it is in."""
    given = named_arguments(module, args, kwargs)
    return [name for name, value in given for _ in tensors_in(value)]


def state_of(module: nn.Module) -> CpState | Tracing | None:
    """Returns the context-parallel state that ``module`` refers to; None in a plain model."""
    return vars(module).get(_ATTRIBUTE)


def path_of(module: nn.Module) -> str:
    """Returns the path of a module in its model, which ``set_state`` has stored."""
    return str(vars(module).get(_PATH, ""))


def set_state(model: nn.Module, state: CpState | Tracing) -> None:
    """Makes every module of ``model`` refer to ``state``, and stores its path."""
    for path, module in model.named_modules():
        vars(module)[_ATTRIBUTE], vars(module)[_PATH] = state, path


def positions(
    module: nn.Module, length: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions in the whole sequence of the tokens that a forward has, (length,) int64.

    Models that compute positions themselves call ``p3d.cp.positions(self, x.shape[1], device=x.device)``
    instead of ``torch.arange(x.shape[1], device=x.device)``. In a plain model the two are equal.

    Args:
        module: the module whose forward calls it.
        length: number of tokens that this rank has.
        device: device of the result.

    Raises:
        StateError: this rank has another number of tokens than ``length``.
    """
    state = state_of(module)
    if isinstance(state, Tracing):
        state.counts = True
        return state.recorder.leaf(
            lambda: torch.empty(length, dtype=torch.int64, device="meta"), []
        )
    batch = WHOLE if state is None else state.running()
    if state is None or batch.sequence is None:
        return torch.arange(length, device=device)
    if length != batch.sequence.rows:
        raise StateError(
            f"positions: {length} tokens, but this rank's part of the sequences has {batch.sequence.rows}"
        )
    return batch.sequence.positions(state.axis, device)
