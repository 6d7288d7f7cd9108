"""What DCP raises when a rank fails, as errors of this package."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from parallel3d.checkpoint.ranks import as_checkpoint_error
from parallel3d.errors import CheckpointError

__all__ = ["HALF_READ", "dcp_errors"]

HALF_READ = (
    "This came while values were read in: some are the checkpoint's now, others not. "
    "Load again before you go on"
)


@contextmanager
def dcp_errors(*, alone: bool, size: int = 1) -> Iterator[None]:
    """Turns a CheckpointException, which DCP raises on all ranks, into one CheckpointError.

    Args:
        alone: for one process, where DCP warns that it is.
        size: how many ranks there are, to name those that failed if not all did.
    """
    try:
        if alone:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        else:
            yield
    except CheckpointException as error:
        problems = {rank: problem for rank, (problem, _) in error.failures.items()}
        for problem in problems.values():
            if not isinstance(problem, Exception):  # a KeyboardInterrupt
                raise problem from error
        found = as_checkpoint_error(problems, size)  # type: ignore[arg-type]
        if error.args[0] == "read":
            found = CheckpointError(f"{found}\n{HALF_READ}")
        raise found from error
