"""Faults j to m of torch 2.13's tensor parallelism, and what users of others complain of: torch's fault
first, then what we do. ``docs/tensor_parallel.md`` lists them all, also those whose test is elsewhere."""

import warnings

import pytest
import torch
from _support.models import LM_PLAN, Lm, tokens
from _support.tp.tp_models import DIM, Mlp
from _support.tp.tp_models import Lm as SmallLm
from _support.tp.tp_world import check_parity, tp_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel
from torch.nn import functional as F

from parallel3d import AgreementError, MeshLayout, PlanError, build_mesh, parallelize
from parallel3d.testing import fake_world, local_world, record_collectives
from parallel3d.tp import (
    Colwise,
    PrepareInput,
    Rowwise,
    SequenceParallel,
    check_same_batch,
    resolve_plan,
)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("hidden", [5, 13])
def test_fault_j_hidden_sizes_that_do_not_divide(hidden: int) -> None:
    with fake_world(0, 2):
        model = parallelize_module(
            Mlp(hidden), tp_mesh(2)["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            model(torch.randn(3, DIM))
    check_parity(Mlp(hidden), {"up": "colwise", "down": "rowwise"}, 2, floats(3, DIM))


def test_fault_k_sequences_that_do_not_divide() -> None:
    with fake_world(0, 2):
        norm = parallelize_module(
            nn.LayerNorm(DIM), tp_mesh(2)["tp"], TorchSequenceParallel(use_local_output=False)
        )
        part = torch.randn(1, 5, DIM).chunk(2, 1)[0]  # 3 rows of 5
        assert norm(part).shape[1] == 6
    model = nn.Sequential(nn.LayerNorm(DIM), Mlp(8))
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1.up": Colwise(input="sequence"),
        "1.down": Rowwise(),
    }
    check_parity(model, plan, 2, floats(1, 5, DIM))  # outputs of 5 rows, and all gradients


def test_fault_l_tied_weights() -> None:
    with fake_world(0, 2):
        mesh, model = tp_mesh(2), SmallLm(12, 8, tied=True)
        torchs = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], torchs)
        assert model.embed.weight is not model.head.weight  # trained apart from here on
        model = SmallLm(12, 8, tied=True)
        plan = {"embed": "embedding", "head": "colwise_gather_output"}
        resolve_plan(model, plan, 2).apply(model, mesh)
        assert model.embed.weight is model.head.weight
        assert isinstance(model.embed.weight, DTensor)
        # torch's own styles under our plan leave them tied too.
        model = SmallLm(12, 8, tied=True)
        resolve_plan(model, torchs, 2).apply(model, mesh)
        assert model.embed.weight is model.head.weight


def test_fault_m_a_rule_that_matches_nothing() -> None:
    with fake_world(0, 2):
        with pytest.warns(UserWarning, match="could not be resolved"):
            parallelize_module(Mlp(8), tp_mesh(2)["tp"], {"upp": ColwiseParallel()})
        with pytest.raises(PlanError, match=r"'upp' matches no module.*nearest: 'up'"):
            resolve_plan(Mlp(8), {"upp": "colwise"}, 2)


def test_fault_m_modules_that_are_not_torchs() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, DIM))
            self.out = nn.Parameter(torch.randn(DIM, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight).relu(), self.out)

    with fake_world(0, 2), pytest.raises(NotImplementedError, match="only support"):
        parallelize_module(Raw(), tp_mesh(2)["tp"], ColwiseParallel())
    with pytest.raises(PlanError, match=r"Colwise.*not Raw"):
        resolve_plan(Raw(), {"": "colwise"}, 2)
    plan = {
        "": PrepareInput(),
        "0": "all_reduce",
        "0.0": "local_params",
        "0.0.weight": "colwise",
        "0.0.out": "rowwise",
    }
    check_parity(nn.Sequential(nn.Sequential(Raw())), plan, 2, floats(3, DIM))


def test_fault_m_applying_a_plan_sends_nothing() -> None:
    # torch scatters from a source rank, and with a plan for the root drops src_data_rank=None.
    with fake_world(0, 2):
        mesh = tp_mesh(2)
        with record_collectives(mesh) as recorder:
            parallelize_module(
                nn.Linear(4, 4), mesh["tp"], {"": ColwiseParallel()}, src_data_rank=None
            )
        assert recorder.calls
        with record_collectives(mesh) as recorder:
            model = nn.Linear(4, 4)
            resolve_plan(model, {"": "colwise"}, 2).apply(model, mesh)
        assert not recorder.calls and isinstance(model.weight, DTensor)
        assert model.weight.placements == (Shard(0),)


def test_complaint_4_each_tp_rank_got_other_data() -> None:
    """accelerate #3682: the loss is "weird" and nothing says why."""
    torch.manual_seed(0)
    plain = Lm()
    with local_world(2) as world:
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        model = parallelize(plain, mesh, LM_PLAN)
        other = world.map(lambda rank: tokens(rank))
        with pytest.raises(AgreementError, match=r"rank 1 has another batch than rank 0"):
            model(other)  # the first one is compared by default
        model(world.map(lambda rank: tokens(0)))
        model(other)  # nobody notices
        check_same_batch(model, mesh)
        with pytest.raises(AgreementError, match=r"rank 1 has another batch than rank 0"):
            model(other)
        model(world.map(lambda rank: tokens(0)))


def test_complaint_14_chunks_that_are_not_in_effect_say_so() -> None:
    """torchtitan #1185, #1613, #866: asynchronous tensor parallelism silently not in effect."""
    plan = {
        "layers.*.norm": SequenceParallel(input="replicate"),
        "layers.*.up": Colwise(input="sequence", chunks=2),
        "layers.*.down": "rowwise",
    }
    with fake_world(0, 2), torch.no_grad():
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        with pytest.raises(
            PlanError, match=r"'layers.0.up'.*no effect in a block that is compiled"
        ):
            parallelize(Lm(), mesh, plan, compile="eager")
        model = parallelize(Lm(), mesh, plan)
        with pytest.warns(UserWarning, match="isn't divisible by the 2 tp ranks"):
            model(tokens(0, length=5))
        with (
            pytest.warns(UserWarning, match="autocast is on"),
            torch.autocast("cpu", torch.bfloat16),
        ):
            model(tokens(0, length=6))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with record_collectives(mesh) as recorder:
                model(tokens(0, length=6))
        gathers = recorder.select("all_gather", axis="tp")
        assert sum(call.asynchronous for call in gathers) == 2 * 2  # blocks, chunks
