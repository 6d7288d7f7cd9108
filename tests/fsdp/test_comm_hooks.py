"""Communication hooks: FSDP1's protocol on every kind of mesh, and the ready-made ones."""

import copy
import functools

import pytest
import torch
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.counted_collectives import Scatter
from _support.fsdp.noted_streams import find, happens_before
from _support.fsdp.wrapped import shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, fsdp, parallelize
from parallel3d._torch.groups import reduce_scatter_single
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import (
    CommHookState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from parallel3d.fsdp.inspect import units_of
from parallel3d.fsdp.options.comm_hooks import HookedReduce
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives, shards_of

FSDP, HSDP, TP = MeshLayout(1, 4, 1), MeshLayout(2, 2, 1), MeshLayout(1, 2, 2)
COMPRESS = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}


def hooked(model: nn.Module, mesh, hook=reduce_scatter_hook, state=None, **options) -> nn.Module:
    """Every unit; parallel3d's own TP where the mesh has a tp axis."""
    model = parallelize(model, mesh, LM_PLAN if mesh["tp"].size() > 1 else None, **options)
    model.register_comm_hook(CommHookState() if state is None else state, hook)
    return model


@pytest.mark.parametrize(
    ("layout", "defer"),
    [(HSDP, "all_reduce"), (TP, "sync"), (MeshLayout(2, 1, 2), "nothing")],
    ids=str,
)
def test_a_hook_that_averages_changes_nothing(layout, defer):
    """Losses, gradients and weights after two steps, with whatever is put off."""
    micro_batches = 1 if defer == "nothing" else 2
    options = {"defer": defer, "micro_batches": micro_batches, "steps": 2, "fp32": False}
    result = assert_parity(Lm, tokens, layout, loss=lm_loss, apply=hooked, **options)
    assert result.grads["float64"] < 1e-12


@pytest.mark.parametrize("layout", [HSDP, MeshLayout(2, 1, 2)], ids=str)
def test_with_the_optimizer_sharded_over_replicate(layout):
    """Two reduce-scatters, one after the other, both the hook's."""
    calls = []

    def hook(state, grad, output=None):
        calls.append((state.world_size, output is not None))
        return reduce_scatter_hook(state, grad, output)

    apply = functools.partial(hooked, hook=hook, shard_optimizer_over_replicate=True)
    result = assert_parity(Even, tokens, layout, loss=lm_loss, apply=apply, steps=2, fp32=False)
    assert result.grads["float64"] < 1e-12
    assert (2, True) in calls


Even = functools.partial(Lm, vocab=20)


@pytest.mark.parametrize("layout", [HSDP, MeshLayout(4, 1, 1), MeshLayout(1, 2, 1)], ids=str)
def test_sums_that_wait_for_every_switch(layout):
    """A reduced gradient, a scattered one and own sums, folded into each other."""
    with local_world(layout.world_size) as world:
        trial = Trial(world, layout, shard_blocks)
        hook = allreduce_hook if layout.shard == 1 else reduce_scatter_hook
        trial.model.register_comm_hook(CommHookState(), hook)
        trial.play("0 -all 1 -sync 2 +sync -all 3 +all 4")
        trial.check([0, 1, 2, 3, 4])


class Noted:
    """A hook of the user's: it sums, and doesn't divide."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, state, grad, output=None):
        sizes = (grad.numel(),) if output is None else (grad.numel(), output.numel())
        self.calls.append((state, *sizes, state.process_group.size()))
        if output is None:
            dist.all_reduce(grad, group=state.process_group)
        else:
            reduce_scatter_single(output, grad, group=state.process_group)


def test_hsdp_calls_both_in_turn_and_the_engine_divides_nothing():
    with local_world(6) as world:
        trial = Trial(world, MeshLayout(2, 3, 1), shard_blocks)
        hook, state = Noted(), CommHookState(trial.mesh)
        trial.model.register_comm_hook(state, hook)
        trial.backward(0)
        trial.check([0], factor=1)
        # Each block has a bucket of matrices and a scalar, which is whole on both axes.
        buckets = [b for unit in units_of(trial.model, True) for b in unit.group.buckets]
        assert all(call[0] is state for call in hook.calls)
        sizes = [call[1:] for call in hook.calls]
        for bucket in buckets:
            whole = bucket.layout.numel
            if bucket.shard_group is None:
                assert sizes.count((whole, 3)) == sizes.count((whole, 2)) == 2  # one in each block
            else:
                assert sizes.count((3 * whole, whole, 3)) == sizes.count((whole, 2)) == 1
        assert len(sizes) == 2 * len(buckets)
        trial.model.zero_grad()
        trial.model.register_comm_hook(None, None)
        trial.backward(1)
        trial.check([1])
        assert len(hook.calls) == 2 * len(buckets)


def test_a_unit_and_those_below_it_only():
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
        hook = Noted()
        trial.model.layers[0].register_comm_hook(CommHookState(), hook)
        trial.backward(0)
        assert len(hook.calls) == 2
        with pytest.raises(StateError, match="has a hook already"):
            trial.model.register_comm_hook(CommHookState(), hook)
        buckets = [b for unit in units_of(trial.model, True) for b in unit.group.buckets]
        # Nothing half-applied.
        assert sum(isinstance(b.settings.reducer, HookedReduce) for b in buckets) == 2


class Whole(nn.Module):
    """Its gradients are its inputs: multiples of 8 up to 160, which bfloat16 holds; so are their means."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 3))
        self.scalar = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + self.scalar * x[0, 0]


def whole_numbers(data_rank: int) -> torch.Tensor:
    return 8.0 * (torch.arange(21).view(7, 3) % 17 + data_rank)


@pytest.mark.parametrize("dtype", COMPRESS, ids=str)
@pytest.mark.parametrize("layout", [FSDP, HSDP, TP], ids=str)
def test_compression_sends_half_and_is_exact_where_it_can_be(layout, dtype):
    with local_world(4) as world:
        mesh = build_mesh(layout, device_type="cpu")
        model = fsdp.fully_shard(Whole(), mesh=mesh)
        inputs = world.map(lambda rank: whole_numbers(layout.data_rank(rank)))
        with record_collectives(mesh) as plain:
            model(inputs).backward()
        model.zero_grad()
        model.register_comm_hook(CommHookState(), COMPRESS[dtype])
        with record_collectives(mesh) as recorder:
            model(inputs).backward()
        with world.paused():
            n = layout.data_size
            mean = sum(whole_numbers(rank) for rank in range(n)) / n
            for rank, box, local in shards_of(model.weight.grad):
                assert local.dtype == torch.float32 and torch.equal(local, mean[box]), rank
            for _, _, local in shards_of(model.scalar.grad):
                assert local == mean[0, 0]
    sums = ("reduce_scatter", "all_reduce")
    usual = [(call.op, call.axis, call.bytes / 2) for call in plain.calls if call.op in sums]
    sent = [(call.op, call.axis, call.bytes) for call in recorder.calls if call.op in sums]
    assert sent == usual


def compressed_on_gloo(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[float, list[bool]]:
    """The largest error of a gradient against the largest one; whether each collective is asynchronous."""
    layout = MeshLayout(*sizes)
    torch.manual_seed(0)
    plain, mesh = Lm(), build_mesh(layout, device_type="cpu")
    model = hooked(copy.deepcopy(plain), mesh, COMPRESS[dtype])
    with record_collectives(mesh) as recorder:
        lm_loss(model, tokens(layout.data_rank(dist.get_rank()))).backward()
    for data_rank in range(layout.data_size):
        (lm_loss(plain, tokens(data_rank)) / layout.data_size).backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    largest = max(float(q.grad.abs().max()) for _, q in pairs)
    error = max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)
    calls = recorder.select("all_to_all", "shard") + recorder.select("all_reduce", "replicate")
    assert len(calls) == (4 if layout.replicate == 1 else 8)
    return error / largest, [call.asynchronous for call in calls]


@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.bfloat16, (2, 2, 1)), (torch.float16, (1, 2, 2))], ids=str
)
def test_compression_on_processes(gloo_pool, dtype, layout):
    """Each of the axes rounds what is sent, and all-reduces their sum too: at most four roundings."""
    for error, asynchronous in gloo_pool.run(compressed_on_gloo, layout, dtype, world_size=4):
        assert 0 < error <= 4 * torch.finfo(dtype).eps / 2
        assert all(asynchronous)


LARGE, SMALL = 30000.0, 2.0**-23  # 4 * LARGE is beyond float16; SMALL / 4 is half its least number


def averaged(factor: float | None, group, like: torch.Tensor, both: bool) -> torch.Tensor:
    """The mean over 4 ranks that all have LARGE and SMALL, through float16."""
    state = CommHookState(group, gradient_predivide_factor=factor)
    grad = torch.where(like > 0, LARGE, SMALL)
    output = torch.empty_like(grad[:2]) if both else None
    fp16_compress_hook(state, grad, output).wait()
    return grad if output is None else output


EXPECTED = {None: (LARGE, SMALL), 1: (float("inf"), SMALL), 4: (LARGE, 0.0)}


@pytest.mark.parametrize("factor", EXPECTED)
def test_float16_neither_overflows_nor_underflows(factor):
    """Divided before by 2 of 4, after by 2. All before: the small ones vanish; all after: overflow."""
    with local_world(4) as world:
        group = build_mesh(FSDP, device_type="cpu").get_group("shard")
        like = world.map(lambda rank: torch.tensor([1.0, 0.0] * 4))
        for result in (averaged(factor, group, like, True), averaged(factor, group, like, False)):
            for each in world.per_rank(result):
                assert tuple(each[:2].tolist()) == EXPECTED[factor]
    state = CommHookState(group)
    assert (state.gradient_predivide_factor, state.gradient_postdivide_factor) == (2, 2)


def with_torchs_hook() -> float:
    """FSDP1's own hook and state; the largest difference from the usual reduction."""
    mesh = build_mesh(FSDP, device_type="cpu")
    torch.manual_seed(0)
    model = shard_blocks(Lm(), mesh)
    lm_loss(model, tokens(dist.get_rank())).backward()
    usual = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    state = torchs.DefaultState(mesh.get_group("shard"))
    model.register_comm_hook(state, torchs.reduce_scatter_hook)
    lm_loss(model, tokens(dist.get_rank())).backward()
    pairs = zip(model.parameters(), usual, strict=True)
    return max(float((p.grad.full_tensor() - q).abs().max()) for p, q in pairs)


def test_torchs_own_hook(gloo_pool):
    assert max(gloo_pool.run(with_torchs_hook, world_size=4)) < 1e-6  # float32, in another order


def wrong(layout: MeshLayout) -> list:
    group = dist.new_group([0, 2], use_local_synchronization=True)
    cases = [
        (None, "bf16", Parallel3dError, "takes a function of"),
        (None, bf16_compress_hook, Parallel3dError, "takes a parallel3d.fsdp.CommHookState"),
        (CommHookState(), lambda state, grad: None, Parallel3dError, "will call its hook as"),
        (CommHookState(group), reduce_scatter_hook, Parallel3dError, "the state is for"),
    ]
    if layout == HSDP:
        state = torchs.DefaultState(group)
        cases += [(state, reduce_scatter_hook, Parallel3dError, "the state is for")]
        cases += [(CommHookState(), lambda s, g, output: None, Parallel3dError, "a default for")]
    return cases


@pytest.mark.parametrize("layout", [FSDP, HSDP], ids=str)
def test_what_is_refused(layout):
    with fake_world(0, 4):
        model = shard_blocks(Net(), build_mesh(layout, device_type="cpu"))
        buckets = [b for unit in units_of(model, True) for b in unit.group.buckets]
        for state, hook, error, match in wrong(layout):
            with pytest.raises(error, match=match):
                model.register_comm_hook(state, hook)
        assert not any(isinstance(b.settings.reducer, HookedReduce) for b in buckets)
        for given in (0, -1.0, "2", True, float("nan")):
            with pytest.raises(Parallel3dError, match="positive number"):
                CommHookState(gradient_predivide_factor=given)
        with pytest.raises(Parallel3dError, match="a process group"):
            CommHookState("shard")
        with pytest.raises(StateError, match="known within a hook"):
            _ = CommHookState().world_size


def test_what_divides_or_reduces_beside_a_hook_is_refused():
    with fake_world(0, 4):
        model = shard_blocks(Lm(), build_mesh(HSDP, device_type="cpu"))
        block = model.layers[0]
        block.set_gradient_divide_factor(3)
        with pytest.raises(StateError, match="divided by 3"):
            model.register_comm_hook(CommHookState(), reduce_scatter_hook)
        block.set_gradient_divide_factor(None)
        block.set_custom_reduce_scatter(Scatter())
        with pytest.raises(StateError, match="custom reduce-scatter"):
            model.register_comm_hook(CommHookState(), reduce_scatter_hook)
        block.set_custom_reduce_scatter(None)
        model.register_comm_hook(CommHookState(), reduce_scatter_hook)
        with pytest.raises(StateError, match="divides its gradients by itself"):
            block.set_gradient_divide_factor(3)
        with pytest.raises(StateError, match="reduces and"):
            block.set_custom_reduce_scatter(Scatter())
        with pytest.raises(StateError, match="reduces and"):
            block.set_allocate_memory_from_process_group_for_comm(True)
        model.set_requires_all_reduce(False)
        lm_loss(model, tokens(0)).backward()
        with pytest.raises(StateError, match="is not all-reduced yet"):
            model.register_comm_hook(None, None)
        model.zero_grad()
        model.register_comm_hook(None, None)
        assert block.set_gradient_divide_factor(3) is None


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_exception_leaves_a_usable_model(at):
    """In a reduce-scatter's place, or an all-reduce's."""
    with local_world(4) as world:
        trial = Trial(world, HSDP, shard_blocks)
        calls = []

        def hook(state, grad, output=None):
            calls.append(grad)
            if len(calls) == at:
                raise KeyError("the user's own")
            return reduce_scatter_hook(state, grad, output)

        trial.model.register_comm_hook(CommHookState(), hook)
        with pytest.raises(KeyError, match="the user's own"):
            trial.backward(0)
        trial.model.reset_iter_state()
        trial.model.zero_grad()
        trial.backward(1, 2)
        trial.check([1, 2])


def test_a_hook_has_the_reduce_dtype_and_tp_is_summed_in_it():
    with fake_world(0, 4):
        dtypes = []

        def hook(state, grad, output=None):
            dtypes.append((grad.dtype, None if output is None else output.dtype))
            return bf16_compress_hook(state, grad, output)

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = hooked(Lm(), build_mesh(TP, device_type="cpu"), hook, mp_policy=policy)
        lm_loss(model, tokens(0)).backward()
        assert set(dtypes) == {(torch.float32, torch.float32)}
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_streams(device):
    """It runs where the collective would, after the gradients are there, and before the optimizer."""

    def hook(state, grad, output=None):
        device.now.put("all-reduce" if output is None else "scatter")
        work = bf16_compress_hook(state, grad, output)
        wait = work.wait
        work.wait = lambda: (device.now.put("waited"), wait())
        return work

    with fake_world(0, 4):
        model = shard_blocks(Lm(layers=2), build_mesh(HSDP, device_type="cpu"))
        model.register_comm_hook(CommHookState(), hook)
        lm_loss(model, tokens(0)).backward()
        device.compute.put("optimizer")
    scatters, sums = find(device.log, "scatter"), find(device.log, "all-reduce")
    (optimizer,) = find(device.log, "optimizer")
    assert [name for _, name, _ in scatters] == ["scatter"] * 3
    assert [name for _, name, _ in sums] == ["replicate"] * 3
    assert all(happens_before(a, b) for a, b in zip(scatters, sums, strict=True))
    assert all(happens_before(each, optimizer) for each in find(device.log, "waited"))
    assert len(find(device.log, "waited")) == 6
