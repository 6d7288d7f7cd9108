"""An all-gather over gloo of one message from each rank to each other, for large parts.

gloo's own all-gather receives into memory that it allocates for each call, and copies from there. Here the
parts arrive where they belong: on 4 ranks of a 2-core machine 8 MiB take 4.7 ms of a rank's CPU time instead
of 6.6. A message costs about 50 us, however small: below ``LEAST_BYTES`` for a part gloo's own is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._compat import backend_name
from parallel3d._trace import issuing

__all__ = ["LEAST_BYTES", "Messages", "gather_from_peers", "is_worthwhile"]

LEAST_BYTES = 2**17

# Of our messages, in a group that the user may send messages in too. Between two ranks they come in the order
# in which they were sent, which is the order of the gathers.
_TAG = 0x33D
_AFTER_A_FAILURE = timedelta(seconds=1)


class Messages:
    """Messages under way; has the ``wait`` of a ``dist.Work``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Returns when all have come or failed: until then their memory is in use.

        Raises:
            RuntimeError: one has failed; the first one's.
        """
        failed: RuntimeError | None = None
        for work in self.works:
            try:
                if failed is None:
                    work.wait()
                else:  # it has had the first one's time
                    work.wait(_AFTER_A_FAILURE)
            except RuntimeError as error:
                failed = failed or error
        self.works = ()
        if failed is not None:
            raise failed


def is_worthwhile(part: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether ``part`` goes over gloo and is large."""
    large = part.is_cpu and part.numel() * part.element_size() >= LEAST_BYTES
    return large and backend_name(group, "cpu") == "gloo"


def gather_from_peers(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> Messages:
    """(S,) of every rank -> (n * S,) on every rank, in rank order. Recorded as one all-gather."""
    n, rank = group.size(), group.rank()
    rows = output.view(n, -1).unbind()
    # Each rank begins with the next one, so that not all send to the same.
    others = [(rank + step) % n for step in range(1, n)]
    with issuing.messages_of("all_gather", output.numel() * output.element_size()):
        works = [dist.irecv(rows[k], group=group, group_src=k, tag=_TAG) for k in reversed(others)]
        works += [dist.isend(part, group=group, group_dst=k, tag=_TAG) for k in others]
    rows[rank].copy_(part)
    return Messages([work for work in works if work is not None])
