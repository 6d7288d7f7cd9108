"""Gradients that are used within the backward: when accelerators' streams hand them over."""

import itertools

import pytest
import torch
from _support.fsdp.noted_streams import find, happens_before
from _support.fsdp.wrapped import cpu_mesh
from _support.models import Lm, lm_loss, tokens
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d import fully_shard, optim
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.options import memory
from parallel3d.testing import fake_world


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1)], ids=str)
def test_as_soon_as_the_next_reduction_is_issued(sizes, offload, device, monkeypatch) -> None:
    """Updates wait for their own reduction, and for no later one; at most two results are there."""
    options = {}
    if offload:
        cpu = torch.device("cpu")
        monkeypatch.setattr(
            memory.CpuOffload, "places", lambda *_: (torch.device("cpu", 0), cpu, False)
        )
        options["offload_policy"] = CPUOffloadPolicy()
    with fake_world(0, 4):
        mesh = cpu_mesh(*sizes)
        model = Lm(layers=3)
        for each in (model.embed, *model.layers, [model.norm, model.head], model):
            fully_shard(each, mesh=mesh, **options)
        optimizer = optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
        names = {id(p): n for n, p in model.named_parameters()}
        in_flight: list[int] = []

        def update(stepping, *_) -> None:
            first = stepping.param_groups[0]["params"][0]
            device.now.put("update " + names[id(first)].rpartition(".")[0].removesuffix(".norm"))
            in_flight.append(len(get_unit(model).context.comm.in_flight))

        optimizer.register_step_pre_hook(update)
        lm_loss(model, tokens(0)).backward()
    last = "copy_to_host" if offload else "all_reduce" if sizes[0] > 1 else "reduce_scatter"
    order = [what for what, _, _ in device.log if what.startswith(("update", last))]
    units = ["norm", "layers.2", "layers.1", "layers.0", "embed"]
    assert order == [
        f"{last} norm",
        *(
            what
            for earlier, unit in itertools.pairwise(units)
            for what in (f"{last} {unit}", f"update {earlier}")
        ),
        "update embed",
    ]
    assert max(in_flight) == 1
    for earlier, unit in itertools.pairwise(units):
        (update_,) = find(device.log, f"update {earlier}")
        assert update_[1] == "compute"
        assert happens_before(find(device.log, f"{last} {earlier}")[0], update_)
        assert not happens_before(find(device.log, f"{last} {unit}")[0], update_)
