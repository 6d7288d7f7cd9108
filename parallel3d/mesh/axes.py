"""The axes of a mesh: one table that the layout, the mesh, the engine, the planner and the tools read.

A further axis is an entry here and a field of ``MeshLayout``. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What the ranks along an axis share."""

    REPLICATED = "replicated over"
    """The parameters: each rank reads other samples, gradients are summed."""
    SHARDED = "sharded over"
    """A copy of the model, of which each rank holds a part; each reads other samples."""
    CONTEXT = "context-parallel"
    """The samples, of which each holds a part of every sequence; parameters are sharded over it too."""
    TENSOR_PARALLEL = "tensor-parallel"
    """Each layer's computation, and the samples."""
    EXPERT = "expert-parallel"
    """Nothing but a copy of the model: each holds other experts, and exchanges tokens for them."""


@dataclass(frozen=True)
class Axis:
    """One axis that a mesh may have: its name, what its ranks share, and other names for it."""

    name: str
    role: Role
    other_names: tuple[str, ...] = ()  # that a mesh may have for it
    hints: tuple[
        str, ...
    ] = ()  # parts of unknown names, from which an error guesses what was meant
    in_mesh_if_one: bool = True  # whether a mesh has it, and texts show it, if it has one rank

    @property
    def reads_other_samples(self) -> bool:
        """Whether it is a data axis: its ranks read different samples of the data."""
        return self.role in (Role.REPLICATED, Role.SHARDED)

    @property
    def has_other_tokens(self) -> bool:
        """Whether its ranks compute different tokens, so that gradients are averaged over the axis."""
        return self.role is not Role.TENSOR_PARALLEL


# shard_cp: the axes shard and cp as one, over which parameters are sharded; see ``fsdp.placement``.
# efsdp: what ep leaves of shard, cp and tp, over which experts are sharded; see ``mesh.joined``.
TABLE = (
    Axis("replicate", Role.REPLICATED, ("dp_replicate",), ("repl", "ddp")),
    Axis("shard", Role.SHARDED, ("dp_shard", "shard_cp", "dp_shard_cp", "efsdp"), ()),
    Axis("cp", Role.CONTEXT, (), ("cp", "context", "seq"), in_mesh_if_one=False),
    Axis("tp", Role.TENSOR_PARALLEL, (), ("tp", "tensor", "model")),
)
"""Outermost first: neighbours on the last axis have consecutive ranks."""

EXPERT = Axis("ep", Role.EXPERT, (), ("expert", "moe"), in_mesh_if_one=False)
"""An axis of a second view of the same ranks: it divides shard x cp x tp, and is innermost there."""

EXPERT_OF = ("shard", "cp", "tp")
"""The axes whose ranks ``EXPERT`` divides."""

AXES = tuple(axis.name for axis in TABLE)
"""Names of the axes of a mesh, outermost first."""

DATA_AXES = tuple(axis.name for axis in TABLE if axis.reads_other_samples)
"""Names of the axes whose ranks read different samples."""

TOKEN_AXES = tuple(axis.name for axis in TABLE if axis.has_other_tokens)
"""Names of the axes whose ranks compute different tokens: gradients are averaged over these."""

_BY_NAME = {name: axis for axis in (*TABLE, EXPERT) for name in (axis.name, *axis.other_names)}


def axis_named(name: str) -> Axis | None:
    """Returns the axis that has ``name`` as its name or one of its other names; None if there is none."""
    return _BY_NAME.get(name)


def names_of(role: Role) -> tuple[str, ...]:
    return tuple(name for name, axis in _BY_NAME.items() if axis.role is role)


def is_data_axis(name: str | None) -> bool:
    """Whether ``name`` is a data axis (or "dp", or an axis joined from data axes, such as "shard_cp")."""
    axis = _BY_NAME.get(name or "")
    return name == "dp" if axis is None else axis.reads_other_samples


def moves_activations(name: str | None) -> bool:
    """Whether layers exchange activations over the axis, and wait for them (cp, tp, ep)."""
    axis = _BY_NAME.get(name or "")
    return axis is not None and axis.role in (Role.CONTEXT, Role.TENSOR_PARALLEL, Role.EXPERT)


def guess(name: str) -> str:
    """Returns the name of the axis that a user may have meant by the unknown ``name``."""
    low = name.lower()
    for axis in reversed((*TABLE, EXPERT)):
        if any(hint in low for hint in axis.hints):
            return axis.name
    return next(axis.name for axis in TABLE if axis.role is Role.SHARDED)


def listed(names: Iterable[str] = AXES) -> str:
    return ", ".join(map(repr, names))
