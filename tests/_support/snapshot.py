"""Snapshot: all of a model that a failed call could have changed."""

import copy
from typing import Any

import torch
from torch import nn

_SCALARS = (int, float, str, bool, type(None))


class Snapshot:
    """Remembers ``model`` when made; ``check`` fails if anything about it is different.

    Compared are, by identity, the modules, their classes, their attributes and what is in those
    that are containers (so parameters, buffers, children and hooks, in their order); the values,
    attributes, gradients and hooks of parameters and buffers; ``state_dict``'s keys; and the
    output for ``inputs``.
    """

    def __init__(self, model: nn.Module, *inputs: torch.Tensor) -> None:
        self.model, self.inputs = model, inputs
        self._forward()  # what a model of another library sets up in its first forward is no change
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.attributes = {name: _attributes(module) for name, module in self.modules.items()}
        self.tensors = _tensors(model)
        # Clones share nothing with the model: a write to it shows.
        self.values = {name: t.detach().clone() for name, t in self.tensors.items()}
        self.details = {name: _details(t) for name, t in self.tensors.items()}
        self.keys = list(model.state_dict())
        self.output = self._forward()

    def _forward(self) -> torch.Tensor | None:
        if not self.inputs:
            return None
        with torch.no_grad():
            return self.model(*self.inputs).clone()

    def check(self) -> None:
        """Raises AssertionError naming what has changed."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        assert list(modules) == list(self.modules)
        for name, module in self.modules.items():
            assert modules[name] is module, f"module {name} was replaced"
            before, now = self.attributes[name], _attributes(module)
            changed = {key for key in before | now if before.get(key) != now.get(key)}
            assert not changed, f"module {name}: changed {sorted(changed)}"
            assert list(before) == list(now), f"module {name}: attributes in another order"
        tensors = _tensors(self.model)
        assert list(tensors) == list(self.tensors)
        for name, tensor in self.tensors.items():
            assert tensors[name] is tensor, f"{name} was replaced"
            assert _details(tensor) == self.details[name], f"{name}: {_details(tensor)}"
            assert _same_values(tensor.detach(), self.values[name]), f"{name}: other values"
        assert list(self.model.state_dict()) == self.keys
        output = self._forward()
        assert output is None or torch.equal(output, self.output), "forward gives another result"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What identifies each attribute's value; the objects live on in the model or the snapshot."""
    found: dict[str, Any] = {"__class__": type(module)}
    for name, value in vars(module).items():
        content: Any = None
        if isinstance(value, dict):
            content = [(key, _identity(item)) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            content = [_identity(item) for item in value]
        elif isinstance(value, set):
            content = copy.copy(value)
        found[name] = (_identity(value), content)
    return found


def _identity(value: Any) -> Any:
    return value if isinstance(value, _SCALARS) else id(value)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _same_values(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    if tensor.is_sparse:
        tensor, expected = tensor.to_dense(), expected.to_dense()
    return tensor.is_meta or torch.equal(tensor, expected)


def _details(tensor: torch.Tensor) -> tuple:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.requires_grad,
        id(tensor.grad),
        tensor._version,
        {key: _identity(value) for key, value in vars(tensor).items()},
        len(tensor._backward_hooks or ()),
        len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()),
    )
