"""``parallelize(engine="torch")``: torch's own engine by the same call, and errors for what it can't do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.bad_input import Case, Table, With, check, each_of, given
from _support.integrations.rows import whole
from _support.integrations.torch_engine_rows import batch, lm, loss_of, parallel, plain, train
from _support.models import SEQUENCE_PLAN, Lm
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import parallel3d as p3d
from parallel3d import MeshError, MeshLayout, Parallel3dError, PlanError
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import GlooPool, fake_world, local_world
from parallel3d.tp import Colwise, PrepareInput, SequenceParallel

FITS = {"dim": 16, "hidden": 32, "vocab": 32}
HAND = {
    "embed": "embedding",
    "layers.*.up": ColwiseParallel(),  # torch's own beside ours
    "layers.*.down": RowwiseParallel(),
    "head": "colwise_gather_output",
}


def gradients(model: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    loss_of(model, rows).backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def compare(sizes: tuple[int, int, int], plan: Any, more: dict[str, Any]) -> None:
    """Gradients and trained weights of both engines, and the plain model's; every rank has its own rows."""
    model, layout = parallel(lm, sizes, "torch", plan, **more)
    ours, _ = parallel(lm, sizes, "parallel3d", plan, **more)
    assert isinstance(model, FSDPModule) and all(unit_of(m) is None for m in model.modules())
    assert [*model.state_dict()] == [*ours.state_dict()]
    torch_units = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    assert torch_units == [n for n, m in ours.named_modules() if isinstance(m, FSDPModule)]
    rows = batch(0).chunk(layout.data_size)[layout.data_rank(torch.distributed.get_rank())]
    want, got = gradients(plain(lm), batch(0)), gradients(model, rows)
    largest = max(g.abs().max() for g in want.values())
    assert want.keys() == got.keys()
    for name, grad in gradients(ours, rows).items():
        assert (got[name] - want[name]).abs().max() <= 1e-9 * largest, name
        assert (got[name] - grad).abs().max() <= 1e-9 * largest, name
    for each in (model, ours):
        each.zero_grad()
    first = whole(model.head.weight).clone()
    torchs, own, alone = train(model, layout, 3), train(ours, layout, 3), train(plain(lm), None, 3)
    assert torchs.losses == pytest.approx(alone.losses, rel=1e-9)
    assert (torchs.weights["head.weight"] - first).abs().max() > 1e-3
    for name, weight in alone.weights.items():
        for other in (torchs, own):
            assert (other.weights[name] - weight).abs().max() <= 1e-9 * weight.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "plan", "more"),
    [
        ((1, 4, 1), None, {}),
        ((2, 2, 1), None, {"reshard_after_forward": False}),
        ((1, 2, 2), HAND, {"activation_checkpointing": True}),
        ((2, 1, 2), HAND, {}),
        ((1, 2, 2), "auto", {"compile": "eager"}),
        ((1, 2, 2), SEQUENCE_PLAN, {}),
    ],
    ids=["FSDP", "HSDP", "checkpointing", "HSDP and tp", "compile", "sequence"],
)
def test_equal_to_plain_and_to_ours(gloo_pool: GlooPool, sizes, plan, more) -> None:
    gloo_pool.run(compare, sizes, plan, more, world_size=4)


def around(folder: str, sizes: tuple[int, int, int]) -> None:
    """Initialization, checkpoints and Hugging Face's folders with it."""
    with torch.device("meta"):
        empty = Lm(**FITS).double()
    layout = MeshLayout(*sizes)
    mesh = p3d.build_mesh(layout, device_type="cpu")
    plan = "auto" if layout.tp > 1 else None
    model = p3d.parallelize(empty, mesh, plan, engine="torch")
    p3d.materialize(model, seed=3)
    with torch.device("meta"):
        want = Lm(**FITS).double()
    p3d.materialize(want, device="cpu", seed=3)
    for name, param in want.named_parameters():
        assert torch.equal(whole(model.get_parameter(name)), param), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = loss_of(model, batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(model, optimizer)
    p3d.checkpoint.save(folder, model, optimizer, step=1)
    later = [step(model, optimizer) for _ in range(2)]
    for engine in ("torch", "parallel3d"):
        other = p3d.parallelize(Lm(**FITS).double(), mesh, plan, engine=engine)
        resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
        p3d.checkpoint.load(folder, other, resumed)
        assert [step(other, resumed) for _ in range(2)] == pytest.approx(later, rel=1e-12)
    refused = {
        "full_params": lambda: p3d.fsdp.full_params(model).__enter__(),
        "EMA": lambda: p3d.optim.EMA(model),
        "step_in_backward": lambda: p3d.optim.step_in_backward(model, torch.optim.SGD, lr=0.1),
    }
    for name, call in refused.items():
        with pytest.raises(Parallel3dError, match=rf"{name}: .*torch's fully_shard; .*{OURS}"):
            call()
    with pytest.raises(Parallel3dError, match="parallel already"):
        p3d.parallelize(model, mesh, plan, engine="torch")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (1, 3, 1)], ids=str)
def test_what_surrounds_training(gloo_pool: GlooPool, tmp_path: Path, sizes) -> None:
    gloo_pool.run(around, str(tmp_path / "run"), sizes, world_size=sizes[0] * sizes[1] * sizes[2])


def torchs(plan: Any = None, **options: Any) -> Any:
    return given(plan, engine="torch", **options)


OURS = r"engine=\"parallel3d\""
PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def fitting(plan: Any, **more: Any) -> Case:
    """A plan for a model whose sizes divide but for those in ``more``."""
    return Case(torchs(plan), build=lambda: Lm(**{**FITS, **more}))


def on_data(build: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(torchs(**options), MeshLayout(shard=4), build, (torch.ones(3, 4),))


CASES: Table = {
    Parallel3dError: {
        r"'fsdp2'.*\"parallel3d\" or \"torch\"": given("auto", engine="fsdp2"),
        f"shard_optimizer_over_replicate=True.*{OURS}": torchs(
            "auto", shard_optimizer_over_replicate=True
        ),
        f"loss_parallel=True.*{OURS}": torchs("auto", loss_parallel=True),
        f"no buffer_dtype.*{OURS}": torchs(
            "auto", mp_policy=p3d.MixedPrecisionPolicy(buffer_dtype=torch.bfloat16)
        ),
        rf"'norm' \(BatchNorm1d\).*full_precision_modules=\(\).*{OURS}": on_data(
            lambda: With(norm=nn.BatchNorm1d(4)),
            mp_policy=p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        ),
        f"parameter scale is a scalar; make it a tensor of one element.*{OURS}": on_data(
            lambda: With(scale=nn.Parameter(torch.ones(())))
        ),
        rf"parameter first\.weight is torch\.float32 in one unit with other.*{OURS}": on_data(
            lambda: With(other=nn.Parameter(torch.ones(4).bfloat16()))
        ),
        rf"parameter odd is not contiguous \(stride \(1, 3\)\).*{OURS}": on_data(
            lambda: With(odd=nn.Parameter(torch.ones(4, 3).t()))
        ),
    },
    PlanError: {
        rf"'layers\.0\.up' as Colwise\(\).*dim 0 of weight is 33, which 2.*{OURS}": fitting(
            PAIR, hidden=33
        ),
        rf"'embed' as VocabParallel\(\): dim 0 of weight is 33.*{OURS}": fitting("auto", vocab=33),
        rf"'layers\.0\.up'.*is 34, which 2 tp x 2 shard ranks.*{OURS}": fitting(PAIR, hidden=34),
        rf"'layers\.0\.up' as Colwise\(.*packed=2\).*by sections.*{OURS}": fitting(
            {"layers.*.up": Colwise(packed=2, output="replicate")}
        ),
        rf"'layers\.0\.up'.*no style for it; leave chunks out.*{OURS}": fitting(
            SEQUENCE_PLAN | {"layers.*.up": Colwise(input="sequence", chunks=2)}
        ),
        rf"'layers\.0' as PrepareInput.*'layers\.0\.up'.*give input=\"sequence\".*{OURS}": fitting(
            PAIR | {"layers.*": PrepareInput(wanted="whole"), "layers.*.up": Colwise("gathered")}
        ),
        rf"'norm' as SequenceParallel\(output='replicate'\).*use SequenceParallel\(\).*{OURS}": fitting(
            SEQUENCE_PLAN | {"norm": SequenceParallel(output="replicate"), "head": "replicate"}
        ),
    },
}


@each_of(CASES)
def test_what_torch_cannot_do_is_said_before_anything_changes(
    error: type[Parallel3dError], says: str, case: Case
) -> None:
    with fake_world(0, 4):
        check(case, error, says, p3d.build_mesh(case.layout, device_type="cpu"))


@pytest.mark.parametrize(
    "policy", [p3d.MixedPrecisionPolicy, torch.distributed.fsdp.MixedPrecisionPolicy]
)
def test_policies(policy: Any) -> None:
    """Ours and torch's; without classes in full precision where that is said."""
    ours = {"full_precision_modules": ()} if policy is p3d.MixedPrecisionPolicy else {}
    dtypes = {"param_dtype": torch.bfloat16, "output_dtype": torch.float64}
    with fake_world(0, 2):
        mesh = p3d.build_mesh(MeshLayout(shard=2), device_type="cpu")
        model = With(norm=nn.BatchNorm1d(4))
        p3d.parallelize(model, mesh, mp_policy=policy(**dtypes, **ours), engine="torch")
        seen = []
        model.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        assert model(torch.ones(3, 4)).dtype == torch.float64 and seen == [torch.bfloat16]


def test_meshes_that_torch_does_not_take() -> None:
    with (
        local_world(4),
        pytest.raises(Parallel3dError, match="simulated ranks; use real processes"),
    ):
        mesh = p3d.build_mesh(MeshLayout(shard=4), device_type="cpu")
        p3d.parallelize(Lm(**FITS), mesh, engine="torch")
    with fake_world(0, 4):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
        with pytest.raises(
            MeshError, match=r"needs a mesh with a shard axis.*build_mesh makes one"
        ):
            p3d.parallelize(Lm(**FITS), mesh, "auto", engine="torch")


@pytest.mark.slow  # it imports transformers
def test_few_heads() -> None:
    """Four ranks, two key and value heads: torch would give half a head to each."""
    from _support.integrations.torch_engine_rows import llama

    with fake_world(0, 4):
        mesh = p3d.build_mesh(MeshLayout(tp=4), device_type="cpu")
        says = r"'model\.layers\.0\.self_attn\.k_proj' as GroupedKv.*no style for it"
        with pytest.raises(PlanError, match=says):
            p3d.parallelize(llama(), mesh, "auto", engine="torch")
