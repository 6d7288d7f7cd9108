"""full_params: whole parameters and gradients to read and edit, and nothing left behind."""

import copy

import pytest
import torch
from _support.fsdp.lifetimes import PeakBytes, deep_model
from _support.fsdp.wrapped import at_rest, cpu_mesh, shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.whole_models import Mixed, equal_on_ranks, plain_model, sharded
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import Parallel3dError, StateError, parallelize
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.testing import (
    fake_world,
    local_world,
    record_collectives,
)

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
