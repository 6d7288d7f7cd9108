"""A plain model and its parallel copy, on simulated ranks or, within gloo processes, on this rank."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from _support.models import LM_PLAN, Lm, lm_loss, tokens
from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import LocalWorld, local_world, shards_of

Apply = Callable[[nn.Module, Any], nn.Module]


class Sides:
    """Data rank r reads sample ``10 * step + r``; the plain model, all of them."""

    def __init__(
        self,
        world: LocalWorld | None,
        sizes: tuple[int, int, int],
        build: Callable[[], nn.Module],
        apply: Apply,
        dtype: torch.dtype,
    ) -> None:
        self.world, self.layout = world, MeshLayout(*sizes)
        with self.outside():
            torch.manual_seed(0)
            self.plain = build().to(dtype)
            model = copy.deepcopy(self.plain)
        self.mesh = build_mesh(self.layout, device_type="cpu")
        self.model = apply(model, self.mesh)

    def outside(self) -> Any:
        """For what is plain: the simulation off."""
        return nullcontext() if self.world is None else self.world.paused()

    def mine(self, of_data_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """What this rank has, or every simulated one."""
        if self.world is None:
            return of_data_rank(self.layout.data_rank(dist.get_rank()))
        return self.world.map(lambda rank: of_data_rank(self.layout.data_rank(rank)))

    def plain_loss(self, step: int) -> torch.Tensor:
        """The mean over data ranks."""
        size = self.layout.data_size
        return sum(lm_loss(self.plain, tokens(10 * step + rank)) for rank in range(size)) / size

    def loss(self, step: int) -> torch.Tensor:
        """This rank's loss."""
        return lm_loss(self.model, self.mine(lambda rank: tokens(10 * step + rank)))

    def step_plain(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """A step of the plain model."""
        with self.outside():
            self.plain_loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(
        self,
        bound: float = 1e-9,
        *,
        of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
        ours: dict[str, torch.Tensor] | None = None,
        plain: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Every rank's shards of ``of(parameter)``, or of ``ours``, against those of the plain model."""
        with self.outside():
            plain = plain or {n: of(p) for n, p in self.plain.named_parameters()}
            ours = ours or {n: of(p) for n, p in self.model.named_parameters()}
            assert list(ours) == list(plain)
            largest = max(float(value.abs().max()) for value in plain.values())
            for name, value in plain.items():
                for rank, box, local in shards_of(ours[name]):
                    assert local.shape == value[box].shape, name
                    if local.numel():
                        difference = float((local - value[box]).abs().max()) / largest
                        assert difference <= bound, (name, rank, difference)


@contextmanager
def side_by_side(
    sizes: tuple[int, int, int],
    build: Callable[[], nn.Module] = Lm,
    apply: Apply | None = None,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Sides]:
    """Both models, in a world of their own unless this is a rank of one."""
    apply = apply or (lambda model, mesh: parallelize(model, mesh, LM_PLAN))
    if dist.is_initialized():
        yield Sides(None, sizes, build, apply, dtype)
        return
    with local_world(MeshLayout(*sizes).world_size) as world:
        yield Sides(world, sizes, build, apply, dtype)


@contextmanager
def same_batch(
    sizes: tuple[int, int, int], apply: Apply | None = None, **sizes_of_lm: int
) -> Iterator[tuple[nn.Module, nn.Module, LocalWorld]]:
    """(plain model, parallel model, world) after a backward of one batch, the same for all ranks."""
    torch.manual_seed(0)
    plain = Lm(**{"layers": 1, **sizes_of_lm}).double()
    model = copy.deepcopy(plain)
    lm_loss(plain, tokens(0)).backward()
    layout = MeshLayout(*sizes)
    with local_world(layout.world_size) as world:
        mesh = build_mesh(layout, device_type="cpu")
        apply(model, mesh) if apply else parallelize(model, mesh, LM_PLAN)
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        yield plain, model, world
