"""Helpers of the engine's tests: a wrapped model in the present world, and whether it is at rest."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from _support.models import Lm
from parallel3d import MeshLayout, build_mesh
from parallel3d._layout.param_layout import ParamLayout, local_chunk, set_param_layout
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import unit_of, units_of


def cpu_mesh(replicate: int = 1, shard: int = 2, tp: int = 1) -> DeviceMesh:
    return build_mesh(MeshLayout(replicate, shard, tp), device_type="cpu")


def shard_blocks(model: nn.Module, mesh, **options) -> nn.Module:
    """Each block, then the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def build(mesh_shape=(1, 2, 1), **options):
    """A wrapped Lm in the present world."""
    mesh = cpu_mesh(*mesh_shape)
    torch.manual_seed(0)
    return shard_blocks(Lm(layers=2), mesh, **options), mesh


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of storage behind a tensor, on all simulated ranks together."""
    return sum(inner.untyped_storage().size() for inner in inner_tensors(tensor))


def at_rest(model: nn.Module, but: Iterable[nn.Parameter] = ()) -> bool:
    """Whether every parameter, but for those, is a DTensor and nothing is gathered."""
    units = {unit_of(m) for m in model.modules()} - {None}
    for unit in units:
        for bucket in unit.group.buckets:
            if bucket.settings.memory.is_fixed:
                if not unit.group.is_sharded:
                    return False
                continue
            for buffer in (bucket.precision.unsharded, bucket.precision.gathered):
                if buffer is not bucket.flat and held_bytes(buffer):
                    return False
    beside = set(map(id, but))
    return all(isinstance(p, DTensor) for p in model.parameters() if id(p) not in beside)


def equal_grads(model: nn.Module, plain: nn.Module, **tolerances: float) -> None:
    """The plain model's gradients, whole, on every rank; none where it has none."""
    for name, q in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (q.grad is None), name
        for of_rank in () if grad is None else inner_tensors(grad.full_tensor()):  # type: ignore[operator]
            torch.testing.assert_close(of_rank, q.grad, msg=name, **tolerances)


def units(model):
    """The modules whose methods set something on every unit, one by one."""
    return [*model.layers, model]


def on_every_unit(model, method, *args, **kwargs):
    for module in units(model):
        getattr(module, method)(*args, **kwargs)


def buckets(model):
    return [bucket for unit in units_of(model, True) for bucket in unit.group.buckets]


class Holder(nn.Module):
    """One parameter, tp-sharded or not."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.weight = param

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def tp_param(whole: torch.Tensor, mesh, placement) -> nn.Parameter:
    """``whole`` as a DTensor on the tp axis, as a style of ours leaves it."""
    tp = mesh["tp"]
    local = whole
    if isinstance(placement, Shard):
        local = local_chunk(whole, placement.dim, tp.size(), tp.get_local_rank())
    else:
        local = torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)
    made = DTensor.from_local(
        local, tp, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    param = nn.Parameter(made.detach())
    set_param_layout(param, ParamLayout("local"))
    return param
