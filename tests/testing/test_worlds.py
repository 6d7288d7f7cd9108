"""fake_world and local_world: what they set up, what they refuse, what they leave behind."""

from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallel3d._torch.fake import init_fake_group
from parallel3d._torch.groups import all_gather_single
from parallel3d._torch.simulated import LocalTensorMode, inner_tensors
from parallel3d.errors import MeshError, StateError
from parallel3d.testing import fake_world, local_world, record_collectives
from parallel3d.testing.worlds import SimulationMode


def test_fake_world_is_that_rank_and_has_meshes_and_collectives() -> None:
    for rank, size in ((0, 1), (3, 8), (4095, 4096)):
        with fake_world(rank, size) as world:
            assert (world.rank, world.size) == (rank, size)
            assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
            assert dist.get_backend() == "fake"
        assert not dist.is_initialized()
    with fake_world(5, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        assert list(mesh.get_coordinate()) == [1, 1]
        out = torch.zeros(8)
        all_gather_single(out, torch.ones(2), group=mesh.get_group("b"))
        assert out.shape == (8,)


def test_bad_world_sizes_and_ranks() -> None:
    for bad in (0, -1, 2.0, True, "8", None):
        worlds = (("world_size", fake_world(0, bad)), ("n", local_world(bad)))  # type: ignore[arg-type]
        for name, world in worlds:
            with pytest.raises(MeshError, match=rf"{name}=.*positive integer"), world:
                pass
    for bad in (-1, 4, 1.0, None):
        with pytest.raises(MeshError, match="from 0 to 3 in a world of 4"), fake_world(bad, 4):  # type: ignore[arg-type]
            pass
    assert not dist.is_initialized()


def test_worlds_do_not_nest() -> None:
    with fake_world(1, 4):
        for inner in (fake_world(0, 2), local_world(2)):
            with pytest.raises(StateError, match=r"already rank 1 .* of 4 \(fake\)"), inner:
                pass
        assert dist.get_world_size() == 4  # the refused world destroyed nothing


def test_worlds_end_when_the_body_raises_or_destroyed_the_group() -> None:
    for world in (fake_world(0, 2), local_world(2)):
        with pytest.raises(KeyError), world:
            raise KeyError
        assert not dist.is_initialized()
    assert type(torch.zeros(1)) is torch.Tensor
    with fake_world(0, 2):
        dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError), local_world(0):
        pass


@pytest.mark.parametrize("n", [1, 2, 8, 12])
def test_local_world_collectives_have_real_numbers(n: int) -> None:
    with local_world(n) as world:
        assert world.size == n
        x = world.map(lambda rank: torch.full((2,), float(rank)))
        dist.all_reduce(x)
        expected = torch.full((2,), n * (n - 1) / 2)
        inner = world.per_rank(x)
    assert len(inner) == n
    assert all(torch.equal(t, expected) for t in inner)


def test_local_world_over_mesh_axes() -> None:
    with local_world(8) as world:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        x = world.map(lambda rank: torch.tensor([10.0**rank]))
        for axis in ("a", "c"):
            dist.all_reduce(x, group=mesh.get_group(axis))
        low, high = 110011.0, 11001100.0
        assert [t.item() for t in world.per_rank(x)] == [low, low, high, high] * 2


def test_map_takes_sizes_that_differ_by_rank() -> None:
    with local_world(3) as world:
        x = world.map(lambda rank: torch.ones(rank, 2))
        y = (x * 2).sum(dim=1)
        assert [tuple(t.shape) for t in world.per_rank(y)] == [(0,), (1,), (2,)]


def test_map_result_is_a_leaf_that_takes_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    with local_world(2) as world:
        x = world.map(lambda rank: weight * (rank + 1)).requires_grad_()
        (x * x).sum().backward()
        assert [t.tolist() for t in world.per_rank(x.grad)] == [[2.0, 2.0], [4.0, 4.0]]
    assert weight.grad is None


def test_map_refuses_what_is_not_a_plain_tensor() -> None:
    with local_world(2) as world:
        with pytest.raises(StateError, match=r"fn\(0\) returned a int"):
            world.map(lambda rank: rank)  # type: ignore[arg-type,return-value]
        inside = torch.zeros(1)
        with pytest.raises(StateError, match="returned a LocalTensor"):
            world.map(lambda rank: inside)


def test_per_rank_of_plain_and_distributed_tensors() -> None:
    plain = torch.arange(6.0)
    with local_world(4) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert [t is plain for t in world.per_rank(plain)] == [True] * 4
        d = distribute_tensor(plain, mesh, [Replicate(), Shard(0)])
        halves = [t.tolist() for t in world.per_rank(d)]
    assert halves == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] * 2


def test_paused_makes_plain_tensors_and_then_resumes() -> None:
    with local_world(2) as world:
        with world.paused():
            model = torch.nn.Linear(3, 3)
            out = model(torch.ones(1, 3))
            out.sum().backward()
            assert type(model.weight.data) is torch.Tensor
            assert type(model.weight.grad) is torch.Tensor
            with world.paused():
                assert type(torch.zeros(1)) is torch.Tensor
            assert type(torch.zeros(1)) is torch.Tensor
        assert len({id(t) for t in world.per_rank(torch.zeros(1))}) == 2
        with pytest.raises(KeyError), world.paused():
            raise KeyError
        assert len({id(t) for t in world.per_rank(torch.zeros(1))}) == 2


def test_a_collective_on_a_plain_tensor_is_an_error() -> None:
    plain = torch.ones(2)
    with local_world(2):
        with pytest.raises(StateError, match="all_reduce on a plain tensor"):
            dist.all_reduce(plain)
        with pytest.raises(StateError, match="all_gather on a plain tensor"):
            dist.all_gather([plain, plain], torch.nn.Parameter(plain).data)
        dist.broadcast(plain, src=0)  # the same on all ranks already
        dist.barrier()


def test_local_world_refuses_a_recorder_around_it() -> None:
    with (
        record_collectives(),
        pytest.raises(StateError, match="inside local_world"),
        local_world(2),
    ):
        pass
    assert not dist.is_initialized()


def test_dtensor_forgets_the_meshes_of_a_world_that_ended() -> None:
    """Equal meshes of two worlds, whose groups of one name are different groups."""

    def axis_names_of_gather(extra: int) -> list[str | None]:
        with local_world(4):
            for _ in range(extra):  # shifts torch's numbering of group names
                dist.new_group([0, 1, 2, 3])
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            d = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
            with record_collectives(mesh) as recorder:
                assert (d + d).sum().full_tensor() is not None
            return [call.axis for call in recorder.calls]

    assert axis_names_of_gather(0) == ["b"]
    assert axis_names_of_gather(1) == ["b"]


# What goes the short way, beside torch's own mode. x: (4, 6), one per rank; u: rank + 1 rows.
OPERATIONS = {
    "values": lambda x, u, plain: [x * 2 + plain[:, None], (u @ x.t()).softmax(-1)],
    "sizes": lambda x, u, plain: [torch.zeros(u.shape[0], 2), x[: u.shape[0]], u.new_ones(u.shape)],
    "lists": lambda x, u, plain: [*x.split([1, 3]), *x.chunk(2, 1), *u.split(2)[:1], *x.unbind()],
    "views": lambda x, u, plain: [
        x,
        x.view(-1).narrow(0, 2, 3).add_(1),
        u.t().expand(6, -1).mul(2),
    ],
    "sizes in place": lambda x, u, plain: [
        x.clone().t_(),
        x.clone().unsqueeze_(0).mul_(2),
        x.clone().t_() + torch.zeros(6, 4),
        u.clone().squeeze_(0).sum(),
    ],
    "several": lambda x, u, plain: [*torch._foreach_mul([x, u], 2.0), *x.sort(), *u.max(0)],
    "no result": lambda x, u, plain: [torch._foreach_add_([x, u], [x, u]), x, u][1:],
    "into another": lambda x, u, plain: [torch.add(x, 1, out=torch.empty(4, 6)), x.copy_(x + 1)],
    "random": lambda x, u, plain: [
        torch.rand(3),
        x.clone().normal_(),
        u.bernoulli(),
        torch.rand(2),
    ],
    "numbers": lambda x, u, plain: [torch.full((2,), x.numel()), torch.full((1,), u.dim())],
    "types": lambda x, u, plain: [
        x.to(torch.bfloat16),
        x.to(torch.complex64).conj() * 1j,
        u.bool(),
    ],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_operations_give_what_torchs_mode_gives(operation: Callable, inference: bool) -> None:
    def results(mode: Callable) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        init_fake_group(0, 3)
        with mode(3) as simulated, torch.inference_mode(inference):
            x = simulated.rank_map(lambda rank: torch.randn(4, 6, dtype=torch.float64))
            u = simulated.rank_map(lambda rank: torch.rand(rank + 1, 6, dtype=torch.float64))
            outputs = operation(x, u, torch.arange(4.0, dtype=torch.float64))
            for output in outputs:  # the wrapper knows the sizes its parts have
                same = output.shape == next(inner_tensors(output)).shape
                assert same or any(isinstance(size, torch.SymInt) for size in output.shape)
        dist.destroy_process_group()
        return [list(inner_tensors(output)) for output in outputs]

    ours, theirs = results(SimulationMode), results(LocalTensorMode)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert [t.stride() for t in a] == [t.stride() for t in b]


def test_gradients_through_views_changed_in_place() -> None:
    """Autograd's own record of views does not need them to share the wrappers' storage."""
    plain = torch.arange(6.0, requires_grad=True)

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        x = leaf * 1
        x[2:4].mul_(3)
        x.view(2, 3).t()[1].add_(x[0])
        return (x * x).sum()

    loss(plain).backward()
    with local_world(2) as world:
        leaf = world.map(lambda rank: plain * (rank + 1)).requires_grad_()
        loss(leaf).backward()
        grads = world.per_rank(leaf.grad)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x = leaf * 1
            y = x.exp()
            y[:2].zero_()
            y.sum().backward()
    torch.testing.assert_close(grads, [plain.grad, 2 * plain.grad])


@pytest.mark.parametrize("heads", [(1, 2), (2, 1)])
def test_reshape_where_it_is_a_view_on_some_ranks_only(heads: tuple[int, int]) -> None:
    """torch's reshape looks at one rank's strides; ranks with one head of several need no copy."""

    def values(rank: int) -> torch.Tensor:
        return torch.arange(heads[rank] * 12.0).view(2, heads[rank], 3, 2)

    with local_world(2) as world:
        x = world.map(values).requires_grad_()
        y = x.transpose(1, 2).reshape(2, 3, -1)
        (y * y).sum().backward()
        for rank, (out, grad) in enumerate(
            zip(world.per_rank(y), world.per_rank(x.grad), strict=True)
        ):
            plain = values(rank).requires_grad_()
            want = plain.transpose(1, 2).reshape(2, 3, -1)
            (want * want).sum().backward()
            assert torch.equal(out, want) and torch.equal(grad, plain.grad)
    with local_world(2) as world, pytest.raises(RuntimeError, match="view size is not compatible"):
        world.map(lambda rank: torch.ones(2, 2 + rank)).t().view(-1)
