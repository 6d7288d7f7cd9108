"""accelerate's FSDP2 path on this engine: ``use()`` at the top of a program."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import fsdp as torch_fsdp

from parallel3d.fsdp import fully_shard

_in_effect: list[use] = []
_before: list[Any] = []  # what was there before the first of them


class use(AbstractContextManager["use"]):
    """Gives programs of accelerate this engine wherever they would get torch's ``fully_shard``.

    It takes effect when it is called, as ``torch.set_grad_enabled`` does, and nothing else of the program
    changes::

        p3d.integrations.accelerate.use()
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...))

    ``undo()``, or the end of a ``with`` block, restores torch's function; if several are in effect, the one
    that ends last does. Models that are sharded already stay as they are. accelerate imports ``fully_shard``
    from ``torch.distributed.fsdp`` each time it shards a model, which is the name that is replaced: so other
    code that imports it from there meanwhile gets ours too, and code that has imported it before does not.

    Raises:
        ImportError: accelerate is not installed.
    """

    def __init__(self) -> None:
        try:
            import accelerate  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "integrations.accelerate needs accelerate; pip install accelerate"
            ) from error
        if not _in_effect:
            _before.append(torch_fsdp.fully_shard)
            _replace(fully_shard)
        _in_effect.append(self)

    def undo(self) -> None:
        """Restores torch's function, unless another ``use`` is in effect; a second call does nothing."""
        if self in _in_effect:
            _in_effect.remove(self)
            if not _in_effect:
                _replace(_before.pop())

    def __exit__(self, *_: object) -> None:
        self.undo()


def _replace(function: Any) -> None:
    torch_fsdp.fully_shard = function
