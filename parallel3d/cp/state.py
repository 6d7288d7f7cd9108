"""What the modules of a context-parallel model share: the axis, and the batch whose forward runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import in_backward_pass, queue_backward_callback, untraced
from parallel3d._util.trees import tensors_in
from parallel3d.cp.attention import attention
from parallel3d.cp.axis import CpAxis
from parallel3d.cp.batch import WHOLE, Batch, batch_of
from parallel3d.cp.choose import Choice, choose
from parallel3d.cp.flow import Recorder
from parallel3d.errors import StateError

_ATTRIBUTE, _PATH = "_parallel3d_cp", "_parallel3d_cp_path"


@dataclass(frozen=True)
class Made:
    """The choice for a module's attention at its last call, and the sizes that it was made for."""

    choice: Choice
    sizes: tuple[int, ...]


class CpState:
    """Of one model; every module of it has it.

    Attributes:
        axis: the axis cp.
        forward: the batch whose forward runs.
        backward: the batch whose backward runs, in which blocks may be recomputed.
        chunked: whether masks have chunks, which begin after padding on the left.
        made: path of a module -> what was chosen for its attention.
    """

    def __init__(self, axis: CpAxis, *, chunked: bool = False) -> None:
        self.axis = axis
        self.forward: Batch | None = None
        self.backward: Batch | None = None
        self.chunked = chunked
        self.made: dict[str, Made] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CpState:
        return CpState(self.axis, chunked=self.chunked)

    def running(self) -> Batch:
        """Returns the batch that is being computed: ``WHOLE`` if every rank has all of it.

        Raises:
            StateError: it is not known.
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
        return WHOLE

    # ---- hooks of the root ----

    @untraced
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Finds the batch of the inputs."""
        batch = batch_of((args, kwargs))
        if batch is None:
            if module.training and torch.is_grad_enabled():
                raise StateError(
                    f"the inputs are not from p3d.cp.shard_batch, and the mesh has cp={self.axis.size}: write "
                    "batch = p3d.cp.shard_batch(batch, mesh) right before the forward, after the batch was "
                    "moved to the device; or evaluate whole sequences in eval mode or under torch.no_grad()"
                )
            batch = WHOLE
        elif batch.sequence is not None and batch.sequence.size != self.axis.size:
            raise StateError(
                f"the batch was cut for cp={batch.sequence.size}, the model's mesh has cp={self.axis.size}"
            )
        if self.chunked and batch.left_padded is not False:
            raise StateError(
                "the model attends within chunks, which begin after padding on the left of a sequence: with "
                "context parallelism pad on the right"
            )
        self.forward = batch
        self.axis.sequence = batch.sequence

    @untraced
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends the forward. The first gradient of an output says whose backward begins."""
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
                tensor.register_hook(begins)

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
        """Attention of this rank's queries, (B, heads, rows, size), to the keys of all ranks."""
        sequence = batch.sequence
        assert sequence is not None
        if q.dim() == 4 and q.shape[2] != sequence.rows:
            raise StateError(
                f"attention has {q.shape[2]} positions, this rank's part of the sequences has {sequence.rows}: "
                "all inputs of the model must be from p3d.cp.shard_batch"
            )
        if batch.key_mask is not None:
            key_mask = batch.key_mask if key_mask is None else key_mask & batch.key_mask
        kind = self.axis.kind
        if kind == "auto":
            sizes = (q.shape[0], sequence.padded, q.shape[1], k.shape[1], q.shape[3])
            made = self.made.get(path)
            if made is None or made.sizes != sizes:
                choice = choose(
                    size=self.axis.size,
                    batch=sizes[0],
                    length=sizes[1],
                    heads=sizes[2],
                    kv_heads=sizes[3],
                    channels=sizes[4],
                    itemsize=q.element_size(),
                    causal=causal,
                    balanced=sequence.balanced,
                )
                made = self.made[path] = Made(choice, sizes)
            kind = made.choice.kind
        return attention(
            q, k, v, self.axis, sequence, causal=causal, key_mask=key_mask, kind=kind, **options
        )


class Tracing:
    """In the place of ``CpState`` in the copy of a model whose forward is recorded.

    Attributes:
        proven: kinds of calls of attention for which ``proofs`` has a function.
        proofs: they raise PlanError where a model's attention computes something else than ours.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.proven: set[Any] = set()
        self.proofs: list[Callable[[], None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracing:
        return self


def state_of(module: nn.Module) -> CpState | Tracing | None:
    """Returns what the module shares with its model; None in a plain model."""
    return vars(module).get(_ATTRIBUTE)


def path_of(module: nn.Module) -> str:
    """Returns the path of a module that calls attention."""
    return str(vars(module).get(_PATH, ""))


def set_path(module: nn.Module, path: str) -> None:
    """Gives it to the module."""
    vars(module)[_PATH] = path


def set_state(model: nn.Module, state: CpState | Tracing) -> None:
    """Gives it to every module of ``model``."""
    for module in model.modules():
        vars(module)[_ATTRIBUTE] = state


def positions(
    module: nn.Module, length: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions in the whole sequence of the tokens that a forward has, (length,) int64.

    For models that make positions themselves: ``p3d.cp.positions(self, x.shape[1], device=x.device)`` in the
    place of ``torch.arange(x.shape[1], device=x.device)``, which it is in a plain model.

    Args:
        module: the module whose forward calls it.
        length: how many tokens this rank has.
        device: of the result.

    Raises:
        StateError: this rank has another number of tokens.
    """
    state = state_of(module)
    if isinstance(state, Tracing):
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
