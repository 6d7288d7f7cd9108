"""The exceptions that parallel3d raises for user mistakes: one family, all of them ``ValueError``."""

from collections.abc import Iterable


class Parallel3dError(ValueError):
    """Base of every error of parallel3d; the message names the value, the rule and a remedy."""


class MeshError(Parallel3dError):
    """An invalid layout or mesh: sizes, names, axis order, world size."""


class PlanError(Parallel3dError):
    """A tensor-parallel plan that does not fit the model."""


class PlanningError(Parallel3dError):
    """A model, cluster, workload or layout that the planner can't handle."""


class MistakesError(PlanningError):
    """Several mistakes in what the planner was given, found together.

    Attributes:
        each: the mistakes, a line each.
    """

    def __init__(self, each: Iterable[str]) -> None:
        self.each = tuple(each)
        several = f"{len(self.each)} mistakes:\n" if len(self.each) > 1 else ""
        super().__init__(several + "\n".join(self.each))


class DryRunError(Parallel3dError, RuntimeError):
    """A program that a dry run can't follow: it branches on a tensor's value, or names a device."""


class AgreementError(Parallel3dError):
    """The ranks of one job were launched with different settings, or do different things. All ranks raise the
    same error."""


class PeerFailureError(Parallel3dError, RuntimeError):
    """Another rank failed, was killed or hangs; the message names it and its error.

    A RuntimeError too, as the collective that failed on this rank raises one.

    Attributes:
        ranks: the ranks that failed; empty if they are unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WrongTypeError(Parallel3dError, TypeError):
    """An argument of an invalid type; a TypeError too, as Python's own functions and torch's raise."""


class StateError(Parallel3dError, RuntimeError):
    """A call that is invalid in the present state, such as clipping gradients that are not reduced yet.

    A RuntimeError too, which torch's engine raises in such cases.
    """


class RefusedError(Parallel3dError, AssertionError):
    """A call that torch's engine refuses with an AssertionError; it is one too, for code that catches it."""


class RefusedStateError(StateError, RefusedError):
    """A call that is invalid in the present state, and that torch's engine refuses with an AssertionError."""


class UnnamedAxesError(MeshError, RefusedError):
    """A mesh of several axes without names."""


class AuditError(Parallel3dError, RuntimeError):
    """A training step does not compute what the plain model does; see ``parallel3d.audit``."""


class CheckpointError(Parallel3dError):
    """A checkpoint that can't be written, or read into this model. The same error on every rank."""


class CorruptCheckpointError(CheckpointError):
    """Stored data that is not what was saved: torn, truncated, changed, or no checkpoint at all."""
