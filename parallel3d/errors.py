"""The exceptions parallel3d raises for user mistakes: one family, all of them ``ValueError``."""

__all__ = [
    "AgreementError",
    "CheckpointError",
    "CorruptCheckpointError",
    "DryRunError",
    "MeshError",
    "Parallel3dError",
    "PeerFailureError",
    "PlanError",
    "PlanningError",
    "StateError",
    "WrongTypeError",
]


class Parallel3dError(ValueError):
    """Base of every error parallel3d raises; its message names the value, the rule and a way out."""


class MeshError(Parallel3dError):
    """A layout or mesh that cannot be: sizes, names, axis order, world size."""


class PlanError(Parallel3dError):
    """A tensor-parallel plan that does not fit the model."""


class PlanningError(Parallel3dError):
    """A model, cluster, workload or layout that the planner can't work with."""


class DryRunError(Parallel3dError, RuntimeError):
    """What a program does and a dry run can't follow: it decides by a tensor's value, or names a device."""


class AgreementError(Parallel3dError):
    """The ranks of one job were launched with different settings. Raised alike on every rank."""


class PeerFailureError(Parallel3dError, RuntimeError):
    """Another rank failed, was killed or hangs, so that this one can't go on; names it and what it said.

    A RuntimeError too, which is what the collective that failed here has raised.

    Attributes:
        ranks: those that are to blame; empty where nobody knows.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WrongTypeError(Parallel3dError, TypeError):
    """An argument of a type that can't be; a TypeError too, as Python's own functions and torch's raise."""


class StateError(Parallel3dError, RuntimeError):
    """A call that is not allowed in the present state, such as clipping half-reduced gradients.

    A RuntimeError too, which torch's engine raises in such cases.
    """


class CheckpointError(Parallel3dError):
    """A checkpoint that can't be written, or read into this model. Raised alike on every rank."""


class CorruptCheckpointError(CheckpointError):
    """What is stored is not what was saved: torn, truncated, changed, or no checkpoint at all."""
