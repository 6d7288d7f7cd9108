"""ForwardProgram: one forward of a model, as a list of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class Ref(NamedTuple):
    """A tensor in the list: its number and that of its storage, in the order of appearance, and its shape."""

    number: int
    storage: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: aten's name, with the overload, such as ``sum.dim_IntList``; or ``attention``, ``leaf``,
            ``branch``.
        args: by name, with a ``Ref`` for each tensor.
        outputs: the tensors that it returns.
        module: path of the module whose code runs it.
        line: ``file:line, in function`` of that code.
    """

    name: str
    args: dict[str, Any]
    outputs: tuple[Ref, ...]
    module: str
    line: str


@dataclass(frozen=True)
class AttentionCall:
    """How a module has called attention.

    Attributes:
        kind: ``"sdpa"`` (F.scaled_dot_product_attention), ``"mha"`` (nn.MultiheadAttention) or ``"hf"``.
        shapes: shapes of queries, keys and values.
        options: what decides about the scores: masks, windows, caps.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any]


@dataclass
class ForwardProgram:
    """The record of one forward.

    Attributes:
        ops: in order.
        inputs: the tensors that the model was given.
        live: storages of parameters.
        outputs: the tensors that it has returned.
        attention: path of a module -> its calls of attention.
    """

    ops: list[Op] = field(default_factory=list)
    inputs: list[Ref] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    outputs: list[Ref] = field(default_factory=list)
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)


def map_refs(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``fn`` of each tensor in lists and tuples."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [map_refs(fn, item) for item in value]
    return value
