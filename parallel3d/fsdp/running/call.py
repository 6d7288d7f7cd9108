"""Call: one forward call of a unit, and when its backward is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from parallel3d._compat import functorch_is_active, hook_gradient, untraced
from parallel3d._tree import map_tensors, tensors_in
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.running.outputs import tensors_of

if TYPE_CHECKING:
    from parallel3d.fsdp.state import Unit

__all__ = ["Call", "watch_output"]

_WATCHERS = "_parallel3d_watchers"  # of a tensor on an attribute: the units that its gradient tells


class Call:
    """It passes the inputs on as aliases, whose gradients are this call's share alone: a hook on an
    input itself would wait for everything else that uses the input.

    The autograd graph holds the call and the call holds the unit, so that a backward still works after
    the model itself is gone. The unit lets go of the call when its forward ends.

    Attributes:
        position: place in the order of forwards.
        others: where the unit is a root, all units: those that it shows have no calls of their own.
        full: whether the unit computed in its parameters' own dtype.
        weights: the numbers of the weights' values that it computed with.
        inputs: number of inputs that have a gradient; when all have theirs, the backward is over.
        remaining: of them, those whose gradient is still to come.
    """

    __slots__ = (
        *("__weakref__", "full", "inputs", "others", "position", "remaining", "unit", "weights"),
    )

    def __init__(self, unit: Unit, position: int, others: Sequence[Unit] = ()) -> None:
        self.unit = unit
        self.others = others
        self.position = position
        self.full = unit.group.full
        self.weights = unit.group.weights
        self.inputs = self.remaining = 0

    def alias(self, value: Any) -> Any:
        """``value`` with its tensors aliased. Other containers stay: the module may write to them."""
        if type(value) is tuple:
            return tuple(map(self.alias, value))
        if not isinstance(value, torch.Tensor):
            for tensor in tensors_in(value):
                if tensor.requires_grad:
                    self.hook(tensor, self.input_done)
                    self.inputs += 1
            return value
        if not value.requires_grad:
            return value
        view = value.view_as(value)
        if view.requires_grad:  # else a transform of torch.func has it on an inner level
            hook_gradient(view, self.input_done)
            self.inputs += 1
        return view

    def hook(self, tensor: torch.Tensor, method: Callable[[torch.Tensor], Any]) -> None:
        """Calls ``method``, of this call, with the gradient of ``tensor``.

        A leaf outlives the graph. Its hook must not keep this call, and goes with it.
        """
        if not (tensor.is_leaf or getattr(tensor, "_is_param", False)):
            hook_gradient(tensor, method)
            return
        weak = weakref.WeakMethod(method)

        def on_gradient(grad: torch.Tensor) -> Any:
            alive = weak()
            return None if alive is None else alive(grad)

        weakref.finalize(self, tensor.register_hook(on_gradient).remove)

    def watched(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, but a gradient that reaches it at any level of ``torch.func`` begins a backward."""
        if tensor.is_floating_point() or tensor.is_complex():
            return _Watched.apply(self, tensor)
        return tensor

    @untraced
    def begin_backward(self, _: torch.Tensor) -> None:
        """Hook on every output: the first gradient to reach this call."""
        if id(self) not in self.unit.begun:
            self.unit.begun.add(id(self))
            self.remaining = self.inputs
        self.unit.pre_backward(self)

    @untraced
    def input_done(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Hook on every alias. With ``create_graph=True`` the gradient is an output as those of forward are:
        a backward that comes to it needs the parameters again.
        """
        self.remaining -= 1
        if self.remaining == 0:
            self.unit.begun.discard(id(self))
            self.unit.maybe_end_backward()
        return self.watched(grad) if torch.is_grad_enabled() else None


def watch_output(unit: Unit, output: Any, call: Call | None, *, attributes: bool) -> Any:
    """Hooks ``call`` to the outputs of ``unit``, and to what is left on its modules.

    Args:
        attributes: whether to look there: a forward of the unit's has ended, or of one of its modules.

    Raises:
        Parallel3dError: an output is a parameter, whose memory is freed now.
    """
    frees = bool(unit.reshards()) or (call is None and not unit.group.kept)
    for tensor in tensors_of(output):
        if unit.group.owns(tensor if tensor._base is None else tensor._base):
            if frees:
                raise Parallel3dError(
                    f"unit {unit.label} returns a parameter of its own, or a view of one, of shape "
                    f"{tuple(tensor.shape)}, whose memory is freed now; return a copy (.clone()), use "
                    "it inside the unit, or give the unit reshard_after_forward=False"
                )
        elif call is not None and tensor.requires_grad:
            call.hook(tensor, call.begin_backward)
    if call is not None and attributes:
        for tensor in unit.members.attributes.tensors():
            watchers = vars(tensor).setdefault(
                _WATCHERS, set()
            )  # it may stay there for many forwards
            if unit.ref not in watchers:
                watchers.add(unit.ref)
                call.hook(tensor, call.begin_backward)
    if call is not None and functorch_is_active():  # a hook is of one level of its transforms
        return map_tensors(call.watched, output)
    return output


class _Watched(torch.autograd.Function):
    """The identity, whose backward begins the call's; of tangents too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call.begin_backward(grads[0])
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None if tangents[1] is None else _Watched.apply(ctx.call, tangents[1])
