"""A model under a mixed-precision policy beside plain ones, on simulated ranks or as one rank of real ones.

The plain model is in the dtype that the policy computes in. There is one per data rank: buffers that
forward writes depend on what a rank has read.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize
from parallel3d.fsdp import fully_shard
from parallel3d.testing import LocalWorld, shards_of
from parallel3d.tp import LocalSizes

DIM = 12
PLAN = {  # LocalSizes: some of the models run in dtypes of their own alone, and can't be tried
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*": LocalSizes(),
}


class Layer(nn.Module):
    """A residual block that multiplies by a buffer, and writes a running mean where it is told to."""

    def __init__(self, norm: Callable[[], nn.Module], writes: bool) -> None:
        super().__init__()
        self.norm = norm()
        self.up = nn.Linear(DIM, 20)
        self.down = nn.Linear(20, DIM)
        self.writes = writes
        self.register_buffer("gain", torch.rand(DIM))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.up.weight.dtype, self.gain.dtype, self.count.dtype))
        if self.writes and self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        hidden = self.up(self.norm(x) * self.gain + self.mean.detach().clone())
        return x + self.down(torch.tanh(hidden))


class Net(nn.Module):
    """Two of them and a head."""

    def __init__(
        self, norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(DIM), writes: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm, writes) for _ in range(2))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows(sample: int) -> torch.Tensor:
    """Sample ``sample``: 7 rows."""
    return torch.randn(7, DIM, generator=torch.Generator().manual_seed(sample))


def wrap(module: nn.Module, layout: tuple[int, int, int] = (1, 2, 1), **options: Any) -> nn.Module:
    """``module`` as one unit; what is no argument of fully_shard is of the policy."""
    arguments = {"reshard_after_forward", "shard_optimizer_over_replicate", "mp_policy"}
    policy = {key: value for key, value in options.items() if key not in arguments}
    rest = {key: value for key, value in options.items() if key in arguments}
    rest.setdefault("mp_policy", MixedPrecisionPolicy(**policy))
    return fully_shard(module, mesh=build_mesh(MeshLayout(*layout), device_type="cpu"), **rest)


class Twins:
    """``model``, of ``own`` dtype under a policy, and ``plains``, in ``compute``."""

    def __init__(
        self,
        world: LocalWorld | None,
        layout: MeshLayout,
        build: Callable[[], nn.Module] = Net,
        *,
        own: torch.dtype = torch.float32,
        compute: torch.dtype = torch.float64,
        options: dict[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        self.world, self.layout, self.own, self.compute = world, layout, own, compute
        with self.paused():
            torch.manual_seed(0)
            self.model = build().to(own)
            self.plains = [copy.deepcopy(self.model).to(compute) for _ in range(layout.data_size)]
        if world is not None:  # each rank's own
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = world.map(lambda _, b=buffer: b.clone())
        self.mesh = build_mesh(layout, device_type="cpu")
        plan = PLAN if layout.tp > 1 else None
        mp_policy = MixedPrecisionPolicy(**policy)
        parallelize(self.model, self.mesh, plan, mp_policy=mp_policy, **options or {})

    def paused(self) -> Any:
        """Plain tensors, also among simulated ranks."""
        return nullcontext() if self.world is None else self.world.paused()

    def inputs(self, batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Data rank r reads sample ``10 * batch + r``."""
        data_rank = self.layout.data_rank
        if self.world is None:
            return rows(10 * batch + data_rank(dist.get_rank())).to(dtype)
        return self.world.map(lambda rank: rows(10 * batch + data_rank(rank)).to(dtype))

    def outputs(self, batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Of the model; the plain ones run too."""
        with self.paused():
            self.expected = [self._run(r, 10 * batch + r) for r in range(len(self.plains))]
        return self.model(self.inputs(batch, dtype))

    def _run(self, index: int, sample: int) -> torch.Tensor:
        plain = self.plains[index]
        output = plain(rows(sample).to(self.compute))
        for buffer in plain.buffers():  # at rest ours are in their own dtype
            buffer.data.copy_(buffer.to(self.own) if buffer.is_floating_point() else buffer)
        return output

    def step(self, batch: int, dtype: torch.dtype = torch.float32) -> float:
        """Forward and backward of all; returns the largest relative difference of the outputs."""
        outputs = self.outputs(batch, dtype)
        with self.paused():
            for expected in self.expected:
                (expected.square().mean() / len(self.plains)).backward()
        outputs.square().mean().backward()
        return self.difference(outputs)

    def difference(self, outputs: torch.Tensor) -> float:
        """Of each rank's ``outputs`` from the plain model's of its data rank."""
        with self.paused():
            return max(
                _relative(part, self.expected[self.layout.data_rank(rank)])
                for rank, _, part in shards_of(outputs.detach())
            )

    def of_gradients(self) -> float:
        """Their largest difference, relative to the model's largest."""
        with self.paused():
            plains = [dict(plain.named_parameters()) for plain in self.plains]
            whole = {name: sum(p[name].grad.double() for p in plains) for name in plains[0]}
            scale = max(float(grad.abs().max()) for grad in whole.values())
            worst = 0.0
            for name, param in self.model.named_parameters():
                for _, box, part in shards_of(param.grad):
                    if part.numel():
                        worst = max(worst, float((part.double() - whole[name][box]).abs().max()))
            return worst / scale

    def of_weights(self, lr: float) -> float:
        """Largest difference, relative to its tensor's largest, after one step of SGD on the gradients."""
        torch.optim.SGD(self.model.parameters(), lr=lr).step()
        with self.paused():
            plains = [dict(plain.named_parameters()) for plain in self.plains]
            worst = 0.0
            for name, param in self.model.named_parameters():
                whole = plains[0][name] - lr * sum(p[name].grad for p in plains)
                for _, box, part in shards_of(param.detach()):
                    if part.numel():
                        worst = max(worst, _relative(part, whole[box]))
            return worst

    def of_buffers(self) -> float:
        """Largest difference of any rank's floating-point buffer."""
        with self.paused():
            return max(
                _relative(part, self.plains[self.layout.data_rank(rank)].get_buffer(name))
                for name, buffer in self.model.named_buffers()
                for rank, _, part in shards_of(buffer)
            )

    def zero_grad(self) -> None:
        """Of all."""
        for model in (self.model, *self.plains):
            model.zero_grad()


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    scale = want.detach().double().abs().max().clamp(min=1e-30)
    return float((got - want.detach()).double().abs().max() / scale)
