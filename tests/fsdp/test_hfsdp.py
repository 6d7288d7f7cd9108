"""HFSDP: shard_optimizer_over_replicate=True, against the plain model and HSDP, and with other options."""

import copy
from pathlib import Path

import pytest
import torch
from _support.fsdp.beside_plain import Net, Run, Trial
from _support.fsdp.breakages import Boom, explode
from _support.fsdp.noted_streams import find, happens_before
from _support.fsdp.wrapped import cpu_mesh, held_bytes
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import Partial, Replicate, Shard

from parallel3d import (
    MeshLayout,
    MixedPrecisionPolicy,
    Parallel3dError,
    build_mesh,
    optim,
    parallelize,
)
from parallel3d.fsdp import (
    CommHookState,
    DataParallelMeshDims,
    StateDictType,
    fp16_compress_hook,
    full_params,
    fully_shard,
    load_model_state_dict,
    model_state_dict,
    reduce_scatter_hook,
)
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.options import hfsdp
from parallel3d.optim import accumulate, clip_grad_norm_
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives

EVEN = {"dim": 16, "hidden": 24, "layers": 1, "vocab": 24}  # each dim divides by 8


def parity(sizes: tuple[int, int, int], **options) -> dict[str, float]:
    result = assert_parity(
        lambda: Lm(layers=1),
        tokens,
        MeshLayout(*sizes),
        loss=lm_loss,
        tp_plan=LM_PLAN if sizes[2] > 1 else None,
        shard_optimizer_over_replicate=True,
        **options,
    )
    return result.grads


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 2, 1), {"micro_batches": 2, "defer": "all_reduce"}),
        ((2, 1, 2), {"micro_batches": 2, "defer": "sync", "fp32": False}),
        ((4, 1, 1), {"fp32": False, "steps": 2}),  # no shard axis: the copy is whole
        ((2, 2, 2), {"fp32": False, "steps": 2, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_simulated_ranks(mesh, options) -> None:
    assert parity(mesh, **options)["float64"] < 1e-12


def made(layout: MeshLayout, sizes: dict | None = None, **options):
    """(model, mesh) within a world."""
    torch.manual_seed(0)
    mesh = build_mesh(layout, device_type="cpu")
    plan = LM_PLAN if layout.tp > 1 else None
    model = Lm(**(sizes or EVEN))
    return parallelize(model, mesh, plan, shard_optimizer_over_replicate=True, **options), mesh


class TestLayout:
    @pytest.mark.parametrize("layout", [MeshLayout(2, 2, 1), MeshLayout(2, 2, 2)], ids=str)
    def test_what_the_optimizer_holds_is_divided_by_replicate(self, layout) -> None:
        """Parameters, gradients and both moments: 1 / (replicate * shard) of what a tp rank has."""
        with fake_world(0, layout.world_size):
            model, _ = made(layout)
            optimizer = torch.optim.AdamW(model.parameters())
            lm_loss(model, tokens(0, vocab=20)).backward()
            optimizer.step()
            for name, param in model.named_parameters():
                tp = 1
                if layout.tp > 1 and not isinstance(param.placements[-1], Replicate):
                    tp = layout.tp
                part = param.numel() // (tp * layout.data_size)
                state = optimizer.state[param]
                held = [param, param.grad, state["exp_avg"], state["exp_avg_sq"]]
                assert [t.to_local().numel() for t in held] == [part] * 4, name

    def test_memory_at_rest(self) -> None:
        """Beside a quarter of the weights there is the copy, a half of them in bfloat16."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        with fake_world(0, 4):
            model, _ = made(MeshLayout(2, 2, 1), mp_policy=policy)
            numel = sum(p.numel() for p in model.parameters())
            lm_loss(model, tokens(0, vocab=20)).backward()
            model.zero_grad()
            units = {get_unit(m) for m in (model.embed, *model.layers, model.norm)}
            held = 0
            for bucket in (bucket for unit in units for bucket in unit.group.buckets):
                for buffer in (
                    bucket.flat,
                    bucket.copy,
                    bucket.precision.gathered,
                    bucket.precision.unsharded,
                ):
                    held += held_bytes(buffer)
            assert held == numel // 4 * 4 + numel // 2 * 2

    def test_what_no_dim_divides_stays_as_in_hsdp(self) -> None:
        with fake_world(0, 4):
            model, _ = made(MeshLayout(2, 2, 1), {"layers": 1, "vocab": 19})
            assert model.head.bias.placements[:2] == (Replicate(), Shard(0))
            assert not isinstance(model.embed.weight.placements[0], Replicate)  # columns
            assert model.embed.weight.placements[1] == Shard(1)

    def test_wished_dims(self) -> None:
        with fake_world(0, 4):
            layer = nn.Linear(8, 6)
            fully_shard(
                layer,
                mesh=cpu_mesh(2, 2),
                shard_placement_fn=lambda p: Shard(p.ndim - 1),
                shard_optimizer_over_replicate=True,
            )
            assert layer.weight.placements[1] == Shard(1)
            assert layer.weight.to_local().shape == (6, 2)
            assert layer.bias.placements[:2] == (Replicate(), Shard(0))  # 6 rows on 4 ranks

    def test_size_one_of_replicate_changes_nothing(self) -> None:
        with fake_world(0, 2):
            model, _ = made(MeshLayout(1, 2, 1))
            assert all(p.placements[0] == Replicate() for p in model.parameters())
            assert not any(get_unit(model.layers[0]).group.renewed)


class TestCollectives:
    @pytest.mark.parametrize("keep", [False, True])
    def test_renewals_of_a_step(self, keep: bool) -> None:
        """The backward gathers over shard only, and where the copy is kept micro-batches do, too; the last
        one scatters over replicate."""
        with fake_world(0, 4):
            model, mesh = made(MeshLayout(2, 2, 1))
            model.set_keep_between_forwards(keep)
            optimizer = torch.optim.AdamW(model.parameters())
            units = 3
            for _ in range(2):
                renewals, scatters = [], []
                for ids in accumulate(model, [tokens(0, vocab=20), tokens(1, vocab=20)]):
                    with record_collectives(mesh) as recorder:
                        lm_loss(model, ids).backward()
                    renewals.append(recorder.count("all_gather", "replicate"))
                    assert recorder.count("all_reduce") == 0
                    assert recorder.count("reduce_scatter", "shard") == units
                    scatters.append(recorder.count("reduce_scatter", "replicate"))
                    assert recorder.count("all_gather", "shard") > 0
                assert renewals == [units, 0 if keep else units]
                assert scatters == [0, units]
                optimizer.step()
                optimizer.zero_grad()

    @pytest.mark.parametrize("keep", [False, True])
    def test_renewals_of_evaluations(self, keep: bool) -> None:
        with fake_world(0, 4), torch.no_grad():
            model, mesh = made(MeshLayout(2, 2, 1))
            model.set_keep_between_forwards(keep)
            counts = []
            for change in (False, False, True):
                if change:
                    model.layers[0].up.bias.mul_(2)
                with record_collectives(mesh) as recorder:
                    model(tokens(0, vocab=20))
                counts.append(recorder.count("all_gather", "replicate"))
            assert counts == ([3, 0, 1] if keep else [3, 3, 3])

    def test_the_renewal_is_in_compute_dtype(self) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        with fake_world(0, 4):
            model, mesh = made(MeshLayout(2, 2, 1), mp_policy=policy)
            numel = sum(p.numel() for p in model.parameters())
            with record_collectives(mesh) as recorder:
                lm_loss(model, tokens(0, vocab=20))
            renewed = recorder.select("all_gather", axis="replicate")
            assert sum(each.bytes for each in renewed) == numel // 2 * 2


def same_as_hsdp() -> None:
    """bfloat16 compute: the very numbers of HSDP, step by step."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    layout = MeshLayout(2, 2, 1)
    model, mesh = made(layout, mp_policy=policy)
    torch.manual_seed(0)
    other = parallelize(Lm(**EVEN), mesh, mp_policy=policy)
    sample = layout.data_rank(dist.get_rank())
    runs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (model, other)]
    for step in range(3):
        losses, norms = [], []
        for each, optimizer in runs:
            loss = lm_loss(each, tokens(4 * step + sample, vocab=20))
            loss.backward()
            norms.append(clip_grad_norm_(each, 0.5))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=1e-4, atol=1e-5)


def moves_between_layouts(folder: str) -> None:
    """Saved by DCP with its optimizer, loaded into HSDP and back into HFSDP with tp."""
    torch.manual_seed(0)
    first, mesh = made(MeshLayout(2, 2, 1))
    other_mesh = cpu_mesh(2, 1, 2)
    second = parallelize(Lm(**EVEN), other_mesh, LM_PLAN, shard_optimizer_over_replicate=True)
    third = parallelize(Lm(**EVEN), mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second, third)]
    lm_loss(first, tokens(0, vocab=20)).backward()
    optimizers[0].step()
    first.zero_grad()
    dcp.save(_state(first, optimizers[0]), checkpoint_id=folder)
    for model, optimizer in zip((second, third), optimizers[1:], strict=True):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        dcp_state.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        for a, b in zip(first.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
            for key in ("exp_avg", "exp_avg_sq"):
                mine, its = optimizers[0].state[a][key], optimizer.state[b][key]
                assert torch.equal(mine.full_tensor(), its.full_tensor())
        # The copy follows what was loaded.
        ids = tokens(3, vocab=20)
        with torch.no_grad():
            torch.testing.assert_close(lm_loss(model, ids), lm_loss(first, ids))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optim_state = dcp_state.get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


@pytest.mark.slow
def test_equals_hsdp_in_bfloat16(gloo_pool) -> None:
    gloo_pool.run(same_as_hsdp, world_size=4)


@pytest.mark.slow
def test_checkpoints_move_between_layouts(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(moves_between_layouts, str(tmp_path), world_size=4)


def test_the_copy_follows_changes_by_hand_and_copies() -> None:
    """load_state_dict (with assign too), in-place edits, double(), deepcopy."""

    def wrap(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_optimizer_over_replicate=True)
        return fully_shard(model, mesh=mesh, shard_optimizer_over_replicate=True)

    with local_world(4) as world:
        trial = Trial(world, MeshLayout(2, 2, 1), wrap)
        trial.backward(0)
        trial.check([0])
        trial.step()
        twin = copy.deepcopy(trial.model)
        saved = {k: v.clone() for k, v in trial.model.state_dict().items()}
        with torch.no_grad():
            for param in trial.model.parameters():
                param.mul_(3.0)
        trial.model.load_state_dict(saved, assign=True)
        trial.backward(1)
        trial.check([1])
        trial.model, first = twin, trial.model
        trial.backward(1)
        trial.check([1])
        trial.model = first
        trial.step()
        trial.backward(2)
        trial.check([2])


@pytest.mark.parametrize("layout", [MeshLayout(2, 1, 1), MeshLayout(2, 2, 1)], ids=str)
def test_inference_mode_before_training(layout) -> None:
    def wrap(model, mesh):
        return fully_shard(model, mesh=mesh, shard_optimizer_over_replicate=True)

    with local_world(layout.world_size) as world:
        trial = Trial(world, layout, wrap)
        with torch.inference_mode():
            trial.forward(0)
        trial.backward(0)
        trial.check([0])


def test_reshard_to_fewer_ranks() -> None:
    def wrap(model, mesh):
        for layer in model.layers:
            fully_shard(
                layer, mesh=mesh, reshard_after_forward=2, shard_optimizer_over_replicate=True
            )
        return fully_shard(model, mesh=mesh, shard_optimizer_over_replicate=True)

    with local_world(8) as world:
        trial = Trial(world, MeshLayout(2, 4, 1), wrap)
        trial.play("0 check step 1 check")


def test_streams(device) -> None:
    """The renewal follows the optimizer and precedes its gather; the second scatter the first."""
    with fake_world(0, 4):
        model, _ = made(MeshLayout(2, 2, 1))
        for _ in range(2):
            device.compute.put("optimizer")
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.0)
            lm_loss(model, tokens(0, vocab=20)).backward()
        device.compute.put("end")
    log = device.log
    start = len(log) - 1 - [what for what, _, _ in reversed(log)].index("optimizer")
    optimizer, log = log[start], log[start:]
    gathers = find(log, "all_gather layers.0")
    assert [stream for _, stream, _ in gathers] == ["replicate", "gather", "gather"]
    assert happens_before(optimizer, gathers[0])
    assert happens_before(gathers[0], gathers[1])
    scatters = find(log, "reduce_scatter layers.0")
    assert [stream for _, stream, _ in scatters] == ["scatter", "replicate"]
    assert happens_before(*scatters)
    assert happens_before(scatters[1], find(log, "end")[0])


class TestErrors:
    def test_dp_mesh_dims(self) -> None:
        with fake_world(0, 4):
            mesh = cpu_mesh(2, 2)
            dims = DataParallelMeshDims(shard="shard", replicate="replicate")
            with pytest.raises(Parallel3dError, match="dp_mesh_dims"):
                fully_shard(
                    nn.Linear(4, 4),
                    mesh=mesh,
                    dp_mesh_dims=dims,
                    shard_optimizer_over_replicate=True,
                )

    def test_no_bool(self) -> None:
        with fake_world(0, 4):
            mesh = cpu_mesh(2, 2)
            model = Net()
            with pytest.raises(Parallel3dError, match="'yes'; it must be True or False"):
                parallelize(model, mesh, shard_optimizer_over_replicate="yes")
            with pytest.raises(Parallel3dError, match="'yes'; it must be True or False"):
                fully_shard(model, mesh=mesh, shard_optimizer_over_replicate="yes")


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        (MeshLayout(2, 2, 1), None),
        (MeshLayout(2, 1, 2), LM_PLAN),
        (MeshLayout(2, 1, 2), SEQUENCE_PLAN),
    ],
    ids=["", "tp", "sequence"],
)
def test_waiting_sums_switched_scaled_and_cleared(layout, plan) -> None:
    """Reduced, partial and unsharded sums in turn; ``.grad`` is all there is."""
    with local_world(4) as world:
        run = Run(world, layout, plan, shard_optimizer_over_replicate=True)
        run.play("0 -all 1")
        grad = run.model.layers[0].up.weight.grad
        assert grad.placements[0] == Partial()
        run.play("-sync 2 +sync -all 3")
        for param in run.model.parameters():
            param.grad.mul_(2.0)
        run.model.set_requires_all_reduce(True)
        run.backward(4)
        run.check([0, 0, 1, 1, 2, 2, 3, 3, 4])
        run.play("-all clear 5 clear +all 6")
        run.check([6])


# -- together with what else a unit does ---------------------------------------------------------------


LAYOUT = MeshLayout(2, 2, 1)


class Matrices(nn.Module):
    """Matrices that four ranks divide, and vectors that they don't."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(**options):
    def wrap(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_optimizer_over_replicate=True, **options)
        return fully_shard(model, mesh=mesh, shard_optimizer_over_replicate=True, **options)

    return wrap


@pytest.fixture
def trial():
    with local_world(4) as world:
        yield lambda **options: Trial(world, LAYOUT, wrapped(**options), Matrices)


@pytest.mark.parametrize(
    ("hook", "tolerance"), [(reduce_scatter_hook, 1e-12), (fp16_compress_hook, 3e-3)]
)
def test_comm_hooks(trial, hook, tolerance) -> None:
    run = trial()
    run.model.register_comm_hook(CommHookState(), hook)
    run.backward(0)
    run.check([0], tolerance=tolerance)
    run.play("-all 1 -sync 2 +sync 3")
    run.check([0, 1, 2, 3], tolerance=tolerance)


def test_whole_tensors(trial) -> None:
    """full_params and full state dicts see the plain model's tensors; edits reach the copy."""
    run = trial()
    run.backward(0)
    run.check([0])
    run.step()
    names = [name for name, _ in run.plain.named_parameters()]
    with full_params(run.model), torch.no_grad():
        for name in names:
            shown, plain = run.model.get_parameter(name), run.plain.get_parameter(name)
            for value in run.world.per_rank(shown):
                torch.testing.assert_close(value, plain, rtol=1e-12, atol=1e-12)
            shown.mul_(0.5)
    with run.world.paused(), torch.no_grad():
        for plain in run.plain.parameters():
            plain.mul_(0.5)
    run.backward(1)
    run.check([1])
    whole = model_state_dict(run.model, type=StateDictType.FULL_STATE_DICT)
    for name in names:
        for value in run.world.per_rank(whole[name]):
            torch.testing.assert_close(value, run.plain.get_parameter(name).detach())
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    load_model_state_dict(run.model, whole, type=StateDictType.FULL_STATE_DICT)
    run.model.zero_grad()
    run.backward(2)
    run.check([2])


def test_full_precision_in_eval(trial) -> None:
    policy = MixedPrecisionPolicy(
        torch.float32, full_precision_in_eval=True, keep_low_precision_grads=True
    )
    run = trial(mp_policy=policy)
    for training in (True, False, True, False):
        run.model.train(training)
        run.model.zero_grad()
        run.backward(0)
        weight = run.model.layers[0].weight
        assert weight.grad.dtype is (torch.float32 if training else torch.float64)
        for param in run.model.parameters():
            param.grad = param.grad.double()
        run.check([0], tolerance=1e-6 if training else 1e-12)


def test_average_swapped_in(trial) -> None:
    run = trial()
    ema = optim.EMA(run.model, 0.0)  # the weights at the last update
    run.backward(0)
    run.step()
    with ema.swapped(), torch.no_grad():
        before = run.forward(3)
    after = run.forward(3).detach()
    assert not any(
        torch.equal(a, b)
        for a, b in zip(run.world.per_rank(before), run.world.per_rank(after), strict=True)
    )
    ema.update()
    with ema.swapped(), torch.no_grad():
        again = run.forward(3)
    for a, b in zip(run.world.per_rank(again), run.world.per_rank(after), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_of_something_else(kept) -> None:
    """One rank may step it alone, so that no rank may take it for a reason to gather."""
    with fake_world(0, 4):
        mesh = build_mesh(LAYOUT, device_type="cpu")
        model = fully_shard(Matrices(), mesh=mesh, shard_optimizer_over_replicate=not kept)
        model.set_reshard_after_backward(not kept)
        model.set_keep_between_forwards(True)
        probe = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(each.parameters()) for each in (probe, model)]
        counts = []
        for optimizer in (None, *optimizers):
            if optimizer is not None:
                optimizer.step()
            with record_collectives(mesh) as recorder:
                model(torch.ones(2, 6)).sum().backward()
            counts.append(recorder.count("all_gather", "shard" if kept else "replicate"))
        assert counts == [1, 0, 1]


def test_a_renewal_that_raises_is_made_up_for(monkeypatch) -> None:
    """As where memory runs out: the next forward must not compute with the weights of before."""
    with fake_world(0, 4), torch.no_grad():
        mesh = build_mesh(LAYOUT, device_type="cpu")
        model = wrapped()(Matrices(), mesh)
        model(torch.ones(2, 6))
        for param in model.parameters():
            param.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(hfsdp, "all_gather", explode)
            with pytest.raises(Boom):
                model(torch.ones(2, 6))
        with record_collectives(mesh) as recorder:
            model(torch.ones(2, 6))
        assert recorder.count("all_gather", "replicate") == 2


def test_updates_within_the_backward(trial) -> None:
    run = trial()
    optim.step_in_backward(run.model, torch.optim.AdamW, lr=0.1)
    with run.world.paused():
        plain = torch.optim.AdamW(run.plain.parameters(), lr=0.1)
    for batch in range(2):
        run.backward(batch)
        with run.world.paused():
            run.plain_grads([batch])
            plain.step()
    assert all(param.grad is None for param in run.model.parameters())
    with full_params(run.model):
        for name, param in run.plain.named_parameters():
            for value in run.world.per_rank(run.model.get_parameter(name).detach()):
                torch.testing.assert_close(value, param.detach(), rtol=1e-9, atol=1e-9)
