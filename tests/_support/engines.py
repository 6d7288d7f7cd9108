"""The two engines that tests/engine runs on: ours, and torch's ``fully_shard``.

A test takes the fixture ``engine`` where one process is enough (a fake world), or ``on_ranks`` where it
needs real ones::

    def body(engine: Engine, factor: float) -> float:  # runs on every rank
        model = engine.fully_shard(nn.Linear(4, 4), mesh=...)
        ...

    def test_something(on_ranks) -> None:
        assert on_ranks(body, 2.0, size=4) == [...]

``pytest --engine torch`` runs the same tests on torch's engine.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallel3d.testing import GlooPool

ENGINES = {"parallel3d": "parallel3d.fsdp", "torch": "torch.distributed.fsdp"}


class Engine:
    """The names of one engine: ``engine.fully_shard``, ``engine.FSDPModule`` and so on.

    Names are looked up when they are used, so that a missing one fails only the tests that need it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = importlib.import_module(ENGINES[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __repr__(self) -> str:
        return f"Engine({self.name!r})"

    def __reduce__(self) -> Any:
        return Engine, (self.name,)

    @property
    def ours(self) -> bool:
        return self.name == "parallel3d"

    @property
    def ShardPlacementResult(self) -> Any:
        """What ``shard_placement_fn`` returns to choose a parameter's mesh; torch exports it nowhere."""
        if self.ours:
            return self._module.ShardPlacementResult
        return _torch_common().ShardPlacementResult

    def mesh_info(self, mesh: torch.distributed.DeviceMesh) -> Any:
        """The mesh as ``ShardPlacementResult`` takes it; torch's class on both engines."""
        common = _torch_common()
        if mesh.ndim == 1:
            return common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The way to clip that each engine's documentation gives."""
        if self.ours:
            from parallel3d.optim import clip_grad_norm_

            return clip_grad_norm_(model, max_norm)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class OnRanks:
    """Runs ``body(engine, *args)`` on ``size`` gloo ranks; the results by rank."""

    def __init__(self, pool: GlooPool, engine: Engine) -> None:
        self._pool = pool
        self._engine = engine

    def __call__(self, body: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
        timeout = 60.0 if self._engine.ours else 20.0  # some of torch's faults are hangs
        return self._pool.run(body, self._engine, *args, world_size=size, timeout=timeout)


def check_fault(fault: str, match: str, error: BaseException | None) -> None:
    """Whether torch fails a test just as the test's mark says.

    Raises:
        AssertionError: it passes (``error`` is None), or fails with another message than ``match``.
    """
    if error is None:
        raise AssertionError(f"torch passes, although the test says it fails by {fault}")
    text = f"{type(error).__name__}: {error}"
    if not re.search(match, text):
        message = f"torch fails otherwise than by {fault} ({match!r}): {text}"
        raise AssertionError(message) from error


def _torch_common() -> Any:
    return importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
