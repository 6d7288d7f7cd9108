"""The same names, signatures and classes as torch's: what replaces it in a program of torch's."""

import dataclasses
import inspect

import pytest
import torch
from _support.engine.twins import device_mesh, shard_layers
from _support.models import Block, Lm
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from parallel3d import fsdp
from parallel3d.testing import fake_world

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
TorchFSDPModule = torch_fsdp.FSDPModule
METHODS = [
    name
    for name in dir(TorchFSDPModule)
    if callable(getattr(TorchFSDPModule, name)) and name[0] != "_"
]


def own_class(name: str) -> type:
    """The class that gives ``FSDPModule.name``."""
    return next(cls for cls in fsdp.FSDPModule.__mro__ if name in vars(cls))


@pytest.mark.parity("function: every name of torch's FSDPModule is overridden")
def test_every_name_is_overridden() -> None:
    """Nothing of torch's class is left that would look for torch's own state."""
    ours = fsdp.FSDPModule
    assert set(dir(TorchFSDPModule)) <= set(dir(ours))
    for name, value in vars(TorchFSDPModule).items():
        if name == "__new__" or (callable(value) and not name.startswith("__")):
            assert own_class(name).__module__.startswith("parallel3d."), name


@pytest.mark.parity("function: every name of torch's FSDPModule is overridden")
@pytest.mark.parametrize("name", METHODS)
def test_signatures_of_methods(name: str) -> None:
    assert parameters(getattr(fsdp.FSDPModule, name)) == parameters(getattr(TorchFSDPModule, name))
    assert inspect.getdoc(getattr(fsdp.FSDPModule, name))


def test_signatures_of_functions() -> None:
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        ours, torchs = parameters(getattr(fsdp, name)), parameters(getattr(torch_fsdp, name))
        own = [
            ("shard_optimizer_over_replicate", KEYWORD_ONLY, False),
            ("block", KEYWORD_ONLY, None),
        ]
        if not hasattr(torch_fsdp, "DataParallelMeshDims"):  # since 2.12
            own.insert(0, ("dp_mesh_dims", KEYWORD_ONLY, None))
        assert ours == torchs + own * (name == "fully_shard"), name


def parameters(function) -> list[tuple]:
    """Name, kind and default of each parameter; of a default policy, its fields."""
    return [
        (p.name, p.kind, fields(p.default)) for p in inspect.signature(function).parameters.values()
    ]


OURS = {  # fields of MixedPrecisionPolicy that torch's may not have; those by position at the end
    "cast_root_forward_inputs",
    "buffer_dtype",
    "keep_low_precision_grads",
    "full_precision_in_eval",
    "full_precision_modules",
    "wire_dtype",
    "param_dtype_override_fn",  # torch has it since 2.15
}


def fields(value):
    """A policy's fields, in order, without those that only ours has."""
    if not dataclasses.is_dataclass(value):
        return value
    is_ours = isinstance(value, fsdp.MixedPrecisionPolicy)
    torchs = {f.name for f in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)}
    own = OURS - torchs if is_ours else set()
    found = dataclasses.asdict(value)
    positional = [f.name for f in dataclasses.fields(value) if not f.kw_only]
    own_positional = own & set(positional)
    assert set(positional[len(positional) - len(own_positional) :]) == own_positional
    return {name: each for name, each in found.items() if name not in own}


@pytest.mark.parity("argument: torch's own policy objects")
def test_policies_have_the_same_fields() -> None:
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        ours, torchs = getattr(fsdp, name), getattr(torch_fsdp, name)
        assert fields(ours()) == fields(torchs())
        assert isinstance(ours(), torchs)
    if hasattr(torch_fsdp, "DataParallelMeshDims"):  # since 2.12
        dims = torch_fsdp.DataParallelMeshDims("a")
        assert fields(fsdp.DataParallelMeshDims("a")) == fields(dims)


@pytest.mark.parity("function: isinstance of torch's FSDPModule")
def test_isinstance_of_both_classes() -> None:
    with fake_world(0, 2):
        model = shard_layers(fsdp, Lm(), device_mesh())
        for unit in (model, *model.layers):
            assert isinstance(unit, TorchFSDPModule) and isinstance(unit, fsdp.FSDPModule)
        assert isinstance(model.layers[0].unshard(async_op=True), torch_fsdp.UnshardHandle)
        assert not isinstance(model.head, TorchFSDPModule)


@pytest.mark.parity("function: isinstance of torch's FSDPModule")
def test_a_slice_of_a_sharded_container_is_a_plain_one(engine) -> None:
    """``model[:2]`` calls the container's class with its modules."""
    with fake_world(0, 2):
        model = nn.Sequential(*[Block() for _ in range(3)])
        mesh = device_mesh()
        for block in model:
            engine.fully_shard(block, mesh=mesh)
        engine.fully_shard(model, mesh=mesh)
        part = model[:2]
        assert type(part) is nn.Sequential and len(part) == 2
        assert part[0] is model[0] and isinstance(part[0], engine.FSDPModule)
        part(torch.randn(2, 12)).sum().backward()
        assert part[0].up.weight.grad is not None
