"""Whole parameters and gradients to read and edit, of every kind of model, and nothing left behind."""

import copy
from collections.abc import Iterator

import pytest
import torch
from _support.fsdp.lifetimes import PeakBytes, deep_model
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes, shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.whole_models import Mixed, equal_on_ranks, plain_model, sharded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallel3d import MixedPrecisionPolicy, Parallel3dError, StateError, parallelize
from parallel3d.fsdp import (
    DataParallelMeshDims,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    full_params,
    fully_shard,
    gather,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
    state_dict_type,
)
from parallel3d.fsdp.options import memory
from parallel3d.testing import fake_world, local_world, record_collectives

MESHES = [(2, 2, 1), (2, 1, 2), (1, 3, 2)]


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_reads_and_writes(shape) -> None:
    plain = plain_model()
    with local_world(shape[0] * shape[1] * shape[2]) as world:
        model = sharded(plain, shape)
        objects = [id(p) for p in model.parameters()]
        with full_params(model):
            shown = named(model)
            equal_on_ranks(world, shown, named(plain))
            assert all(isinstance(p, nn.Parameter) for p in shown.values())
            for name, p in plain.named_parameters():
                assert shown[name].requires_grad == p.requires_grad
            with torch.no_grad():
                model.head.weight.mul_(2)
                model.scale.add_(1)
                model.codes.add_(3)
            model.norm.bias.data.fill_(5)
            model.head.bias.requires_grad_(False)
            model.layers[0].down.weight = nn.Parameter(model.layers[0].down.weight.detach() - 1)
        assert at_rest(model) and objects == [id(p) for p in model.parameters()]
        assert not model.head.bias.requires_grad and model.norm.bias.requires_grad
        with world.paused(), torch.no_grad():
            for p, change in (
                (plain.head.weight, lambda p: p * 2),
                (plain.scale, lambda p: p + 1),
                (plain.codes, lambda p: p + 3),
                (plain.norm.bias, lambda p: p * 0 + 5),
                (plain.layers[0].down.weight, lambda p: p - 1),
            ):
                p.copy_(change(p))
        with full_params(model, writeback=False):
            equal_on_ranks(world, named(model), named(plain))
            model.norm.bias.data.fill_(7)  # is not kept
        with full_params(model, writeback=False, offload_to_cpu=True):
            equal_on_ranks(world, named(model), named(plain))


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_gradients(shape) -> None:
    plain = plain_model()
    lm_loss(plain, tokens(0)).backward()
    with local_world(4) as world:
        model = sharded(plain, shape)
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        with full_params(model, with_grads=True):
            for name, p in model.named_parameters():
                want = named(plain)[name].grad
                assert (p.grad is None) == (want is None), name
                if want is not None:
                    for tensor in world.per_rank(p.grad):
                        torch.testing.assert_close(tensor, want, rtol=1e-9, atol=1e-12)
            model.head.weight.grad.mul_(2)
            model.norm.weight.grad = None
            model.layers[0].up.weight.grad = torch.ones_like(model.layers[0].up.weight)
        assert model.norm.weight.grad is None
        assert model.head.weight.grad.placements == model.head.weight.placements
        with full_params(model, with_grads=True, writeback=False):
            assert model.norm.weight.grad is None
            for tensor in world.per_rank(model.head.weight.grad):
                torch.testing.assert_close(tensor, 2 * plain.head.weight.grad)
            for tensor in world.per_rank(model.layers[0].up.weight.grad):
                assert torch.equal(tensor, torch.ones(20, 12, dtype=torch.float64))
        with full_params(model):
            assert model.head.weight.grad is None


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_replicas_agree(shape) -> None:
    """Each rank writes its own number; ranks that hold one shard must not part for ever."""
    with local_world(4) as world:
        model = sharded(plain_model(), shape)
        mine = world.map(lambda rank: torch.tensor(float(rank), dtype=torch.float64))
        with full_params(model), torch.no_grad():
            for p in model.parameters():
                if p.dtype is torch.float64:
                    p.copy_(mine)
        with full_params(model, writeback=False):
            for name, p in model.named_parameters():
                first, *others = world.per_rank(p.detach())
                assert all(torch.equal(first, other) for other in others), name


def test_one_all_gather_per_bucket_and_axis() -> None:
    with fake_world(0, 8):
        mesh = cpu_mesh(2, 2, 2)
        model = parallelize(Lm(layers=2), mesh, LM_PLAN)
        with record_collectives(mesh) as recorder, full_params(model):
            entered = len(recorder.calls)
        units = 4  # embedding, two blocks, norm + head
        assert recorder.count("all_gather", "shard") == recorder.count("all_gather", "tp") == units
        assert entered == 2 * units
        # On leaving: what replicate and tp copies have is the first one's.
        assert {(c.op, c.axis) for c in recorder.calls[entered:]} == {
            ("broadcast", "replicate"),
            ("broadcast", "tp"),
        }


class TestWhatIsShown:
    def test_parts_of_a_model(self) -> None:
        """A root that is no unit, one unit alone, and ignored parameters."""
        with local_world(2):
            mesh = cpu_mesh()
            model = Mixed()
            ignored = {model.layers[0].norm.weight}
            unit = fully_shard(model.layers[0], mesh=mesh, ignored_params=ignored)
            fully_shard(model.head, mesh=mesh)
            with full_params(model):
                assert not any(isinstance(p, DTensor) for p in model.parameters())
                assert model.layers[0].norm.weight in ignored
            fully_shard(model, mesh=mesh)
            with full_params(model, recurse=False):
                assert not isinstance(model.norm.weight, DTensor)
                assert isinstance(unit.up.weight, DTensor)
                with full_params(unit):
                    assert not isinstance(unit.up.weight, DTensor)
            with full_params(nn.Linear(2, 2)):  # nothing to show
                pass

    def test_on_the_first_rank_only(self) -> None:
        for rank in (0, 3):
            with fake_world(rank, 4):
                model = deep_model(cpu_mesh(2, 2))
                with PeakBytes() as memory, full_params(model, writeback=False, rank0_only=True):
                    whole = [not isinstance(p, DTensor) for p in model.parameters()]
                if rank == 0:
                    assert all(whole)
                else:  # one layer at a time: what is gathered, and the parameter made of it
                    assert not any(whole)
                    assert memory.peak <= 2.5 * model[0].weight.nbytes

    def test_unshard_by_hand_is_restored_with_the_edits(self) -> None:
        with local_world(2) as world:
            model = shard_blocks(Lm(layers=1), cpu_mesh())
            model.layers[0].unshard()
            with full_params(model):
                model.layers[0].up.bias.data.fill_(3)
            for tensor in world.per_rank(model.layers[0].up.bias.detach()):
                assert torch.equal(tensor, torch.full((20,), 3.0))
            model.layers[0].reshard()
            assert at_rest(model)

    def test_held_for_evaluation_sees_the_edits(self) -> None:
        plain = plain_model()
        with local_world(2) as world:
            model = sharded(plain, (1, 2, 1))
            model.set_reshard_after_forward(False)
            ids = world.map(lambda r: tokens(0))
            with torch.no_grad():
                model(ids)
                with full_params(model):
                    model.head.weight.mul_(2)
                got = model(ids)
                with world.paused():
                    plain.head.weight.mul_(2)
                    want = plain(tokens(0))
            for tensor in world.per_rank(got):
                torch.testing.assert_close(tensor, want)


class Boom(Exception):
    pass


class TestRefusals:
    def test_where_it_may_not_be(self) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(layers=2), cpu_mesh())
            with full_params(model):
                with pytest.raises(StateError, match="already"), full_params(model.layers[1]):
                    pass
                for use in (
                    lambda: lm_loss(model, tokens(0)),
                    lambda: model.layers[0].unshard(),
                    lambda: model.double(),
                    lambda: copy.deepcopy(model),
                ):
                    with pytest.raises(StateError):
                        use()
            assert at_rest(model)

            def enter(*_: object) -> None:
                with full_params(model):
                    pass

            for hook in (
                model.layers[1].register_forward_pre_hook,
                model.layers[1].register_full_backward_hook,
            ):
                handle = hook(enter)
                with pytest.raises(StateError, match="in a forward or backward"):
                    lm_loss(model, tokens(0)).backward()
                handle.remove()
                model.reset_iter_state()
            lm_loss(model, tokens(0)).backward()
            assert at_rest(model)

    def test_options(self) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(layers=1), cpu_mesh())
            with (
                pytest.raises(Parallel3dError, match=r"None is not an nn\.Module"),
                full_params(None),
            ):
                pass
            for options, match in (
                ({"rank0_only": True}, "writeback=False"),
                ({"offload_to_cpu": "yes"}, "offload_to_cpu is 'yes'"),
            ):
                with pytest.raises(Parallel3dError, match=match), full_params(model, **options):
                    pass
            model.set_requires_gradient_sync(False)
            lm_loss(model, tokens(0)).backward()
            waits = pytest.raises(StateError, match="is not reduced yet")
            with waits, full_params(model, with_grads=True):
                pass
            assert at_rest(model)
            with full_params(model):  # values don't wait
                pass

    def test_meta(self) -> None:
        with fake_world(0, 2):
            with torch.device("meta"):
                model = Lm(layers=1)
            shard_blocks(model, cpu_mesh())
            with pytest.raises(StateError, match="meta device"), full_params(model):
                pass
            assert all(isinstance(p, DTensor) for p in model.parameters())

    def test_an_exception_drops_the_edits(self) -> None:
        plain = plain_model()
        with local_world(2) as world:
            model = sharded(plain, (1, 2, 1))
            with pytest.raises(Boom), full_params(model, with_grads=True):
                model.head.weight.data.zero_()
                raise Boom
            assert at_rest(model)
            misfit = pytest.raises(Parallel3dError, match=r"shape must stay \(19, 12\)")
            with misfit, full_params(model):
                model.norm.weight.data.zero_()
                model.head.weight = nn.Parameter(torch.zeros(3, 12))
            assert at_rest(model)
            with full_params(model):
                equal_on_ranks(world, named(model), named(plain))

    def test_a_gather_that_fails_shows_nothing(self, monkeypatch) -> None:
        from parallel3d.fsdp.state_dict import full_params as whole

        with fake_world(0, 2):
            model = shard_blocks(Lm(layers=2), cpu_mesh())
            calls = []

            def gather(*args):
                calls.append(args)
                if len(calls) == 2:
                    raise Boom
                return whole_gather(*args)

            whole_gather = whole.all_gathered
            monkeypatch.setattr(whole, "all_gathered", gather)
            with pytest.raises(Boom), full_params(model):
                pass
            assert len(calls) == 2 and at_rest(model)
            lm_loss(model, tokens(0)).backward()


# -- unusual models: ties, lists, meshes of other kinds, precisions, ignored parts ---------------------


FULL = StateDictType.FULL_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


def test_hybrid_shards_with_tensor_parallelism() -> None:
    """Three axes that cut one dim: tp, then shard, then replicate."""
    torch.manual_seed(0)
    plain = Lm(dim=16, hidden=24, layers=1, vocab=24).double()
    with local_world(8) as world:
        mesh = cpu_mesh(2, 2, 2)
        model = parallelize(
            copy.deepcopy(plain), mesh, LM_PLAN, shard_optimizer_over_replicate=True
        )
        weight = model.head.weight
        assert sum(p.is_shard() or hasattr(p, "split_factor") for p in weight.placements) == 3
        with full_params(model):
            equal_on_ranks(world, named(model), named(plain))
            model.norm.weight.data.fill_(2)
        for over in mesh.mesh_dim_names:
            joined = gather(weight, over)
            for tensor in world.per_rank(joined.full_tensor()):
                assert torch.equal(tensor, plain.head.weight.detach())
        load_model_state_dict(model, plain.state_dict(), type=FULL)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())


def test_tied_across_units() -> None:
    """One Parameter under two names, replaced under one of them; one state of the optimizer."""
    plain = Lm(layers=1, tied=True)
    with local_world(2) as world:
        mesh = cpu_mesh()
        model = copy.deepcopy(plain)
        for unit in (model.embed, model.head, model):
            fully_shard(unit, mesh=mesh)
        with full_params(model):
            equal_on_ranks(world, named(model), named(plain))
            assert model.embed.weight is model.head.weight
            model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        assert model.embed.weight is model.head.weight
        state = model_state_dict(model, type=FULL)
        assert list(state) == list(plain.state_dict())
        for name in ("embed.weight", "head.weight"):
            assert torch.equal(world.per_rank(state[name])[1], 2 * plain.embed.weight.detach())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        optimizer.step()
        saved = optim_state_dict(model, optimizer, type=FULL)
        assert set(saved["state"]) == set(dict(plain.named_parameters()))
        load_optim_state_dict(model, optimizer, saved, type=FULL)


def test_a_list_of_modules_cut_along_another_dim() -> None:
    plain = Lm(layers=1)
    with local_world(4) as world:
        mesh = cpu_mesh(2, 2)
        model = copy.deepcopy(plain)
        tail = [model.norm, model.head]
        fully_shard(tail, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        fully_shard(model, mesh=mesh)
        with record_collectives(mesh) as recorder:
            state = model_state_dict(model, type=FULL)
        equal_on_ranks(world, state, plain.state_dict())
        # What each module has of their unit is gathered when it is its turn, and nothing twice.
        whole = sum(p.nbytes for p in plain.parameters())
        assert sum(call.bytes for call in recorder.calls) <= 1.1 * whole
        with full_params(model.norm, recurse=False):
            assert not isinstance(model.head.weight, DTensor)
            assert isinstance(model.embed.weight, DTensor)


def test_dp_mesh_dims() -> None:
    plain = nn.Linear(5, 7)
    with local_world(4) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = copy.deepcopy(plain)
        for name, own in (("weight", Shard(0)), ("bias", Replicate())):
            value = distribute_tensor(getattr(model, name).detach(), mesh, [Replicate(), own])
            setattr(model, name, nn.Parameter(value))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        with full_params(model):
            equal_on_ranks(world, named(model), named(plain))
            model.bias.data.add_(1)
        load_model_state_dict(model, plain.state_dict(), type=FULL)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())


def test_torchs_styles_and_an_ignored_part() -> None:
    """An ignored DTensor stays as it is in full_params; a full state dict has it whole, and loads it."""
    plain = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 4))
    with local_world(4) as world:
        mesh = cpu_mesh(1, 2, 2)
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
        with full_params(model):
            assert isinstance(model[0].bias, DTensor) and not isinstance(model[0].weight, DTensor)
        local = {k: v.clone() for k, v in model_state_dict(model, type=LOCAL).items()}
        load_model_state_dict(model, {k: v * 2 for k, v in plain.state_dict().items()}, type=FULL)
        found = model_state_dict(model, type=FULL)
        equal_on_ranks(world, found, {k: v * 2 for k, v in plain.state_dict().items()})
        load_model_state_dict(model, local, type=LOCAL)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())


def test_torchs_checkpoint_wrapper() -> None:
    """Its hooks rename what is saved and loaded; the optimizer's names follow."""
    plain = Lm(layers=2)
    with local_world(2) as world:
        model = copy.deepcopy(plain)
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        model.layers[1].up = checkpoint_wrapper(model.layers[1].up)
        shard_blocks(model, cpu_mesh())
        load_model_state_dict(model, {k: v * 2 for k, v in plain.state_dict().items()}, type=FULL)
        load_model_state_dict(model, plain.state_dict(), type=FULL, broadcast_from_rank0=True)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())
        optimizer = torch.optim.AdamW(model.parameters())
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        optimizer.step()
        saved = optim_state_dict(model, optimizer, type=FULL)
        assert list(saved["state"]) == [name for name, _ in plain.named_parameters()]
        load_optim_state_dict(model, optimizer, saved, type=FULL)


def test_low_precision() -> None:
    """Values in the parameters' own dtype, gradients in that which they have."""
    plain = Lm(layers=1)
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, keep_low_precision_grads=True
    )
    with local_world(2) as world:
        model = shard_blocks(copy.deepcopy(plain), cpu_mesh(), mp_policy=low)
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        with full_params(model, with_grads=True):
            equal_on_ranks(world, named(model), named(plain))
            assert model.head.weight.grad.dtype is torch.bfloat16
            first, second = world.per_rank(model.head.weight.grad)
            assert torch.equal(first, second)
        assert model.head.weight.grad.dtype is torch.bfloat16


def test_cpu_offload(monkeypatch) -> None:
    """Gathered where the model computes, written back to shards and gradients in the CPU's memory."""
    elsewhere, storage_device = (
        torch.device("cpu", 0),
        torch.device("cpu"),
    )  # two names for two devices
    monkeypatch.setattr(
        memory.CpuOffload, "places", lambda self, given, mesh: (elsewhere, storage_device, False)
    )
    torch.manual_seed(0)
    plain = Lm(layers=1).double()
    with local_world(4) as world:
        model = shard_blocks(
            copy.deepcopy(plain), cpu_mesh(2, 2), offload_policy=CPUOffloadPolicy()
        )
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        with full_params(model, with_grads=True):
            equal_on_ranks(world, named(model), named(plain))
            model.head.weight.data.mul_(2)
            model.head.weight.grad.zero_()
        assert all(not tensor.any() for tensor in world.per_rank(model.head.weight.grad))
        with world.paused(), torch.no_grad():
            plain.head.weight.mul_(2)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())
        load_model_state_dict(model, plain.state_dict(), type=FULL)
        assert at_rest(model)
        got = lm_loss(model, world.map(lambda r: tokens(0)))
        with world.paused():
            want = lm_loss(plain, tokens(0))
        for value in world.per_rank(got.detach()):
            torch.testing.assert_close(value, want.detach())


def test_memory_of_their_own_and_inference_mode() -> None:
    """torch.save of one tensor saves it alone; what inference mode makes can be trained."""
    with fake_world(0, 4):
        model = parallelize(Lm(layers=1), cpu_mesh(1, 2, 2), LM_PLAN)
        with torch.inference_mode():
            state = model_state_dict(model, type=FULL)
            with full_params(model):
                model.norm.weight.add_(1)
        for name, value in state.items():
            assert held_bytes(value) == value.nbytes, name
        lm_loss(model, tokens(0)).backward()
        assert at_rest(model)


# -- offload_to_cpu: whole tensors leave the device before the next are gathered -----------------------


class Device(PeakBytes):
    """The most bytes that were on the device at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.storage_device: set[int] = set()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place of ``Tensor.cpu``."""
        copy = torch.clone(tensor)
        self._made.pop(copy.untyped_storage()._cdata, None)
        self.storage_device.add(copy.data_ptr())
        return copy

    def has_sent(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.storage_device


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: device.take(tensor))
    with fake_world(0, 4):
        yield device


def deep_and_optimizer():
    model = deep_model(cpu_mesh(1, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


# Gathered rows, the whole tensor made of them, and its copy while it is made.
MOST = 3.5 * 32 * 32 * 4


def test_whole_parameters_leave_the_device(device) -> None:
    model, _ = deep_and_optimizer()
    with device, full_params(model, writeback=False, offload_to_cpu=True):
        assert all(device.has_sent(p) for p in model.parameters())
    assert device.peak <= MOST


@pytest.mark.parametrize("as_context", [False, True], ids=["argument", "context"])
def test_model_state_dict_leaves_the_device(device, as_context) -> None:
    model, _ = deep_and_optimizer()
    model[0].register_buffer("count", torch.ones(3))
    with device:
        if as_context:
            with state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
                state = model.state_dict()
        else:
            state = model_state_dict(model, type=FULL, offload_to_cpu=True)
    assert len(state) == 9 and all(map(device.has_sent, state.values()))
    assert device.peak <= MOST


@pytest.mark.parametrize("as_context", [False, True], ids=["argument", "context"])
def test_optim_state_dict_leaves_the_device(device, as_context) -> None:
    model, optimizer = deep_and_optimizer()
    with device:
        if as_context:
            config = FullOptimStateDictConfig(offload_to_cpu=True)
            with state_dict_type(model, FULL, optim_config=config):
                state = optim_state_dict(model, optimizer)
        else:
            state = optim_state_dict(model, optimizer, type=FULL, offload_to_cpu=True)
    moments = [s[key] for s in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 16 and all(map(device.has_sent, moments))
    assert device.peak <= MOST


def test_parts_of_this_rank(device) -> None:
    model, optimizer = deep_and_optimizer()
    with device:
        parts = model_state_dict(model, type=LOCAL, offload_to_cpu=True)
        states = optim_state_dict(model, optimizer, type=LOCAL, offload_to_cpu=True)["state"]
    assert len(parts) == 8 and all(map(device.has_sent, parts.values()))
    assert all(device.has_sent(state["exp_avg"]) for state in states.values())


def test_without_it_they_stay(device) -> None:
    model, optimizer = deep_and_optimizer()
    with device:
        weights = model_state_dict(model, type=FULL)
        state = optim_state_dict(model, optimizer, type=FULL, offload_to_cpu=False)
    assert not device.storage_device
    assert device.peak >= (8 + 16) * 32 * 32 * 4
    assert weights and state["state"]
