"""What FSDP1's MixedPrecision has beyond FSDP2's: each policy beside plain models that do it by hand."""

import copy
import gc
import weakref

import pytest
import torch
from _support.extended import Bf16, extend
from _support.fsdp.lifetimes import collector_off, references
from _support.fsdp.precision_twins import DIM, Net, Twins, rows, wrap
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from parallel3d import AgreementError, MeshLayout, MixedPrecisionPolicy, StateError, parallelize
from parallel3d._torch.autograd import follows_grad_dtype
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.options.memory import CopyToHost
from parallel3d.fsdp.reduction import Reduction
from parallel3d.optim import accumulate
from parallel3d.testing import fake_world, local_world, record_collectives

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LONG = torch.int64
# Computing in float64 with float32 at rest, all is exact but for what is rounded at rest.
UP = {"param_dtype": FP64, "reduce_dtype": FP64}
# Layouts of the cases: with tp, and HSDP.
LAYOUTS = [(2, 2, 1), (1, 2, 2)]


def low_precision_grads(world, layout):
    """Kept as they were reduced, over two micro-batches with one all-reduce, and added to later ones."""
    twins = Twins(world, layout, **UP, keep_low_precision_grads=True)
    for batch in accumulate(twins.model, range(2)):
        assert twins.step(batch) < 1e-12
        if world is not None and batch == 0 and layout.replicate > 1:
            assert twins.model.head.weight.grad.dtype is FP64  # a sum that waits
    assert twins.of_gradients() < 1e-12
    twins.model.set_requires_gradient_sync(False)
    twins.step(2)  # what is there is folded into this rank's own sum
    twins.model.set_requires_gradient_sync(True)
    twins.step(3)
    assert twins.of_gradients() < 1e-12
    assert {(p.dtype, p.grad.dtype) for p in twins.model.parameters()} == {(FP32, FP64)}
    assert twins.of_weights(lr=0.1) < 1e-6  # float32 at rest
    weight = twins.model.head.weight
    weight.grad = weight.grad.float()  # for an optimizer that wants it so


def full_precision_in_eval(world, layout):
    """train -> eval -> train, also with groups that stay gathered; outputs and gradients in both."""
    twins = Twins(
        world,
        layout,
        own=FP64,
        param_dtype=FP32,
        buffer_dtype=FP32,
        full_precision_in_eval=True,
        options={"reshard_after_forward": False},
    )
    seen = twins.model.layers[1].seen

    def both(train):
        for model in (twins.model, *twins.plains):
            model.train(train)

    assert 1e-12 < twins.step(0, FP64) < 1e-5 and seen[-1] == (FP32, FP32, FP32, LONG)
    both(train=False)
    with torch.no_grad():
        for batch in range(2):
            assert twins.difference(twins.outputs(batch, FP64)) < 1e-12
    assert seen[-1] == (FP64, FP64, FP64, LONG)
    twins.zero_grad()
    assert twins.step(1, FP64) < 1e-12 and twins.of_gradients() < 1e-12  # reduced in it too
    both(train=True)
    twins.zero_grad()
    assert 1e-12 < twins.step(2, FP64) < 1e-5 and 1e-12 < twins.of_gradients() < 1e-5
    buckets = get_unit(twins.model.layers[0]).group.buckets
    assert {b.precision.compute_dtype for b in buckets} == {FP32}
    # An evaluation between forward and backward; then both precisions in one backward.
    twins.zero_grad()
    trained = twins.outputs(3, FP64)
    with twins.paused():
        sum(e.square().mean() for e in twins.expected).div(len(twins.plains)).backward()
    both(train=False)
    with torch.no_grad():
        twins.model(twins.inputs(4, FP64))
    evaluated = twins.outputs(5, FP64)
    assert twins.difference(evaluated) < 1e-12
    with twins.paused():
        sum(e.square().mean() for e in twins.expected).div(len(twins.plains)).backward()
    both(train=True)
    (trained.square().mean() + evaluated.square().mean()).backward()
    assert twins.of_gradients() < 1e-5


def buffers(world, layout):
    """Cast while it runs, as they were at rest; what forward writes comes back."""
    twins = Twins(world, layout, lambda: Net(writes=True), **UP, buffer_dtype=FP64)
    model = twins.model
    before = dict(model.named_buffers())
    for batch in range(3):  # two forwards, a backward
        twins.outputs(batch)
        assert twins.step(batch + 10) < 1e-12
        assert twins.of_buffers() == 0
    assert all(dict(model.named_buffers())[name] is buffer for name, buffer in before.items())
    state = model.state_dict()
    assert {state[f"layers.0.{name}"].dtype for name in ("gain", "mean")} == {FP32}
    assert model.layers[0].seen[-1] == (FP64, FP64, FP64, LONG)
    # Loaded ones are seen, and a copy has buffers of its own.
    twin = copy.deepcopy(model)
    before = dict(twin.named_buffers())
    with twins.paused():
        for plain in twins.plains:
            plain.layers[0].gain.mul_(2)
    state["layers.0.gain"] = state["layers.0.gain"] * 2
    given = {key: torch.clone(value) if key in before else value for key, value in state.items()}
    model.load_state_dict(given, assign=True)
    assert twins.step(20) < 1e-12
    inputs = twins.inputs(20)
    assert twins.difference(twin(inputs)) > 1e-3
    twin.load_state_dict(given)
    assert all(buffer is before[name] for name, buffer in twin.named_buffers())
    # As what was assigned, it has been written to since.
    assert twins.difference(twin(inputs)) > 1e-3
    twin.load_state_dict(state)
    assert twins.difference(twin(inputs)) < 1e-12


def recomputed(world, layout):
    """Activation checkpointing sees the cast buffers and the dtypes of the first time."""
    options = {"activation_checkpointing": True}
    policy = {"buffer_dtype": FP64, "full_precision_in_eval": True}
    twins = Twins(world, layout, **UP, **policy, options=options, keep_low_precision_grads=True)
    assert twins.step(0) < 1e-12 and twins.of_gradients() < 1e-12
    assert twins.model.layers[0].seen == [(FP64, FP64, FP64, LONG)] * 2
    twins.model.eval()
    twins.model(twins.inputs(0)).sum().backward()
    assert twins.model.layers[0].seen[2:] == [(FP32, FP32, FP32, LONG)] * 2


def kept_modules(world, layout):
    """Norms in float64 within a float32 model."""
    keep = {"full_precision_modules": (nn.LayerNorm,)}
    twins = Twins(
        world, layout, own=FP64, compute=FP32, param_dtype=FP32, buffer_dtype=FP32, **keep
    )

    def by_hand(norm):
        norm.double()
        norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        norm.register_forward_hook(lambda _, args, output: output.float())

    for plain in twins.plains:
        for layer in plain.layers:
            by_hand(layer.norm)
    dtypes = []
    twins.model.layers[0].norm.register_forward_hook(
        lambda module, args, output: dtypes.append((module.weight.dtype, output.dtype))
    )
    with record_collectives(twins.mesh) as recorder:
        assert twins.step(0, FP64) < 1e-5
    assert twins.of_gradients() < 1e-5 and dtypes == [(FP64, FP32)]
    unit = "layers.0"
    gathers = [c.bytes for c in recorder.select("all_gather", "shard", unit)]
    norm = 2 * DIM * 8  # weight and bias, in their own dtype
    assert norm in gathers[: len(gathers) // 2]
    buckets = get_unit(twins.model.layers[0]).group.buckets
    reduced = FP64 if follows_grad_dtype else FP32  # without a reduce_dtype, from torch 2.15 on
    assert {(b.precision.compute_dtype, b.precision.reduce_dtype) for b in buckets} == {
        (FP32, reduced),
        (FP64, FP64),
    }


class Asks(Net):
    """Notes the dtype that the root's forward is given."""

    def forward(self, x):
        self.given = x.dtype
        return super().forward(x.double())


def root_inputs(world, layout):
    """The root's cast and the others', apart from each other."""
    twins = Twins(
        world, layout, Asks, **UP, cast_forward_inputs=False, cast_root_forward_inputs=True
    )
    assert twins.step(0) < 1e-12 and twins.model.given is FP64
    twins = Twins(world, layout, Asks, **UP, cast_root_forward_inputs=False)
    assert twins.step(0) < 1e-12 and twins.model.given is FP32
    assert twins.model.layers[0].seen[0][0] is FP64


CASES = [
    low_precision_grads,
    full_precision_in_eval,
    buffers,
    recomputed,
    kept_modules,
    root_inputs,
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_simulated_ranks(case, sizes) -> None:
    with local_world(4) as world:
        case(world, MeshLayout(*sizes))


# -- full_precision_in_eval where it meets other things ------------------------------------------------


class TestFullPrecisionInEval:
    def test_bytes_on_the_wire_and_in_memory(self) -> None:
        """No side but the one in use has memory; a mode that stays costs no further gather."""
        with local_world(2):
            model = wrap(
                nn.Linear(DIM, DIM, bias=False),
                param_dtype=BF16,
                full_precision_in_eval=True,
                reshard_after_forward=False,
            )
            model.set_keep_between_forwards(True)
            (bucket,) = get_unit(model).group.buckets
            low = bucket.precision.unsharded
            mesh = model.weight.device_mesh
            x = torch.ones(2, DIM)
            assert bucket.other_precision is None  # built when it is asked for
            with record_collectives(mesh) as recorder, torch.no_grad():
                model(x)
                assert held_bytes(low) == 2 * 2 * DIM * DIM
                model.eval()
                model(x), model(x)
                assert (
                    held_bytes(low) == 0
                    and held_bytes(bucket.precision.unsharded) == 2 * 4 * DIM * DIM
                )
                model.train()
                model(x)
            assert [call.bytes for call in recorder.select("all_gather")] == [
                2 * DIM * DIM,
                4 * DIM * DIM,
                2 * DIM * DIM,
            ]
            assert bucket.precision.unsharded is low
            model.reshard()
            assert at_rest(model) and held_bytes(bucket.other_precision.unsharded) == 0

    def test_unshard_follows_the_mode(self) -> None:
        with fake_world(0, 2):
            model = wrap(nn.Linear(DIM, 3), param_dtype=BF16, full_precision_in_eval=True)
            model.eval().unshard()
            assert model.weight.dtype is FP32
            model.train()(rows(0))  # kept by the user, in the other dtype
            model.unshard()
            assert model.weight.dtype is BF16
            model.reshard()
            assert at_rest(model)

    def test_with_what_else_gathers(self) -> None:
        """HFSDP's copy, fewer ranks between forward and backward, extensions; copies and conversions."""
        x = rows(0).double()

        def outputs(model):
            return [model.train(mode)(x).detach() for mode in (False, True, False)]

        with local_world(4):
            for layout, options in (
                ((2, 2, 1), {"shard_optimizer_over_replicate": True}),
                ((1, 4, 1), {"reshard_after_forward": 2}),
            ):
                torch.manual_seed(0)
                plain = nn.Linear(DIM, 8).double()
                model = wrap(
                    copy.deepcopy(plain),
                    layout,
                    param_dtype=FP32,
                    full_precision_in_eval=True,
                    **options,
                )
                for each in (model, copy.deepcopy(model)):
                    full, lower, again = outputs(each)
                    torch.testing.assert_close(full, again)
                    torch.testing.assert_close(full, plain(x).detach())
                    assert (full.dtype, lower.dtype) == (FP64, FP32)
                    torch.testing.assert_close(lower.double(), full, rtol=1e-5, atol=1e-5)
                    each.eval()(x).sum().backward()
                    assert each.weight.grad.dtype is FP64
                    with torch.no_grad():
                        each.weight.mul_(2), each.bias.mul_(2)
                    torch.testing.assert_close(outputs(each)[2], full * 2)

    @pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 1)], ids=str)
    def test_trained_after_inference_mode(self, layout) -> None:
        """The first evaluation may be in inference mode. On one rank nothing but the shards is needed."""
        with fake_world(0, layout[1]):
            model = wrap(
                nn.Linear(DIM, 8),
                layout,
                param_dtype=BF16,
                buffer_dtype=BF16,
                full_precision_in_eval=True,
            )
            with torch.inference_mode():
                model.eval()(rows(0))
            (bucket,) = get_unit(model).group.buckets
            assert (bucket.precision.unsharded is bucket.flat) == (layout[1] == 1)
            x = rows(0).requires_grad_()
            model(x).sum().backward()
            model.train()(x).sum().backward()
            assert x.grad is not None and model.weight.grad is not None

    def test_extensions(self) -> None:
        with fake_world(0, 1):
            model = extend(nn.Sequential(nn.Linear(DIM, 8)), Bf16)
            wrap(model, (1, 1, 1), param_dtype=BF16, full_precision_in_eval=True)
            kinds = [model.train(mode)(rows(0)).dtype for mode in (True, False, True)]
            assert kinds == [BF16, FP32, BF16]

    def test_a_frozen_part_within_a_model_in_training(self) -> None:
        """Its inputs come in the lower dtype of the units around it."""
        with fake_world(0, 2):
            policy = MixedPrecisionPolicy(BF16, buffer_dtype=BF16, full_precision_in_eval=True)
            model = parallelize(Net(), cpu_mesh(), mp_policy=policy)
            model.layers[1].eval()
            model(rows(0)).sum().backward()
            assert [layer.seen[0][:2] for layer in model.layers] == [(BF16, BF16), (FP32, FP32)]

    @pytest.mark.parametrize("limit", [None, 1])
    def test_a_backward_gathers_what_its_forward_computed_with(self, limit) -> None:
        """Also where the mode has changed since, and whatever says what is gathered ahead."""
        with fake_world(0, 2):
            mesh = cpu_mesh()
            policy = MixedPrecisionPolicy(BF16, buffer_dtype=BF16, full_precision_in_eval=True)
            model = parallelize(Net(), mesh, mp_policy=policy)
            model.set_limit_all_gathers(limit)
            with record_collectives(mesh) as forward:
                loss = model(rows(0)).float().sum()
            model.eval()
            with record_collectives(mesh) as backward:
                loss.backward()
            gathered = [
                {c.unit: c.bytes for c in recorder.select("all_gather") if "layers" in c.unit}
                for recorder in (forward, backward)
            ]
            assert gathered[0] == gathered[1] and len(gathered[0]) == 2
            assert len(backward.select("all_gather")) == 2

    def test_neither_over_is_an_error(self) -> None:
        """An unused parameter's gradient never comes: the later call's backward may not be over."""
        with fake_world(0, 2):
            block = nn.Linear(DIM, 3)
            block.unused = nn.Parameter(torch.ones(2))
            model = wrap(block, param_dtype=BF16, full_precision_in_eval=True)
            x = rows(0)
            loss = model(x).float().sum()
            loss = loss + model.eval()(x).sum()
            with pytest.raises(StateError, match="call backward for each on its own"):
                loss.backward()
            model.zero_grad()
            model(x).sum().backward()
            assert model.weight.grad is not None


# -- modules kept in full precision, gradients in low precision ----------------------------------------


class Normed(nn.Module):
    """Linear, batch norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 9)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 3)
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x))
        self.seen.append((x.dtype, self.norm.weight.dtype, self.norm.running_mean.dtype))
        return self.down(x)


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


class TestBatchNorm:
    def test_keeps_its_precision_by_default(self) -> None:
        """Statistics of several forwards, and gradients, as of a model that is cast by hand."""
        plain, model = normed(), normed()
        plain.up.bfloat16(), plain.down.bfloat16()
        plain.norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        plain.norm.register_forward_hook(lambda _, args, output: output.bfloat16())
        with local_world(2) as world:
            for name in ("running_mean", "running_var"):  # each rank's own
                buffer = getattr(model.norm, name)
                setattr(model.norm, name, world.map(lambda _, b=buffer: b.clone()))
            wrap(model, param_dtype=BF16, buffer_dtype=BF16)
            for sample in range(3):
                with world.paused():
                    expected = plain(rows(sample).bfloat16())
                got = model(world.map(lambda _, s=sample: rows(s)))
                assert all(torch.equal(part, expected) for part in world.per_rank(got))
            got.float().sum().backward()
            with world.paused():
                expected.float().sum().backward()
            assert model.seen[-1] == (BF16, FP32, FP32)
            for name in ("running_mean", "running_var"):
                for part in world.per_rank(model.norm.get_buffer(name)):
                    assert torch.equal(part, plain.norm.get_buffer(name))
            for name in ("norm.weight", "norm.bias"):
                (first, *_) = world.per_rank(model.get_parameter(name).grad.full_tensor())
                torch.testing.assert_close(first, plain.get_parameter(name).grad)

    def test_what_f_batch_norm_writes_behind_the_version_counter(self) -> None:
        """Named no class, its buffers are cast as others: in bfloat16, and written back."""
        plain = normed().bfloat16()
        with fake_world(0, 1):
            model = wrap(
                normed(), (1, 1, 1), param_dtype=BF16, buffer_dtype=BF16, full_precision_modules=()
            )
            original, version = model.norm.running_mean, model.norm.running_mean._version
            for sample in range(3):
                assert torch.equal(model(rows(sample)), plain(rows(sample).bfloat16()))
            assert model.seen[-1] == (BF16, BF16, BF16)
            assert model.norm.running_mean is original and original._version > version
            assert torch.equal(original, plain.norm.running_mean.float())
            # What eval does not write keeps all its digits; so does what training leaves as it is.
            original.fill_(1 + 2**-20)
            model.eval()(rows(0))
            assert original[0] == 1 + 2**-20
            model.train()
            model.norm.momentum = 0.0
            model(rows(0))
            assert original[0] == 1 + 2**-20 and model.norm.running_var.dtype is FP32

    def test_torchs_policy_keeps_none(self) -> None:
        with fake_world(0, 2):
            model = wrap(normed(), mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=BF16))
            (bucket,) = get_unit(model).group.buckets
            assert bucket.precision.compute_dtype is BF16 and type(model.norm) is nn.BatchNorm1d

    def test_without_mixed_precision_it_costs_nothing(self) -> None:
        with fake_world(0, 2):
            model = wrap(normed())
            assert type(model.norm) is nn.BatchNorm1d
            assert len(get_unit(model).group.buckets) == 1

    def test_as_a_unit_of_its_own(self) -> None:
        """Its inputs reach it as they are: not cast to the lower dtype and back."""
        with fake_world(0, 1):
            norm = wrap(nn.BatchNorm1d(DIM), (1, 1, 1), param_dtype=BF16)
            got = norm(rows(0))
            torch.testing.assert_close(got, nn.BatchNorm1d(DIM)(rows(0)), rtol=1e-6, atol=1e-6)


class Scores(nn.Module):
    """Has neither parameters nor buffers."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.dtypes = (x.dtype, scale.dtype)
        return {"scores": x * scale, "order": x.argsort()}


class TestKeptModules:
    def test_without_parameters(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.scores = nn.Linear(DIM, 5), Scores()

            def forward(self, x):
                x = self.linear(x)
                return self.scores(x, scale=x.mean())

        with fake_world(0, 2):
            model = wrap(Model(), param_dtype=BF16, full_precision_modules=(Scores,))
            output = model(rows(0))
            assert model.scores.dtypes == (FP32, FP32)  # within a container, by keyword
            assert (output["scores"].dtype, output["order"].dtype) == (BF16, torch.int64)

    def test_all_inside_and_what_others_hold_too(self) -> None:
        """A tied weight computes in the dtype of those that could not compute otherwise."""
        with fake_world(0, 2):
            block = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
            model = nn.Sequential(nn.Linear(DIM, DIM), block)
            block[0].weight = model[0].weight
            wrap(model, param_dtype=BF16, full_precision_modules=(nn.Sequential,))
            buckets = get_unit(model).group.buckets
            # All are inside the outer one.
            assert {b.precision.compute_dtype for b in buckets} == {FP32}
            block = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
            model = nn.ModuleDict({"a": nn.Linear(DIM, DIM), "b": block})
            block[0].weight = model["a"].weight
            holder = nn.Module()
            holder.inner = model
            wrap(holder, param_dtype=BF16, full_precision_modules=(nn.Sequential,))
            names = {
                b.precision.compute_dtype: [p.name for p in b.params]
                for b in get_unit(holder).group.buckets
            }
            assert names[BF16] == ["inner.a.weight", "inner.a.bias"]
            assert names[FP32] == ["inner.b.0.bias", "inner.b.1.weight", "inner.b.1.bias"]

    def test_reductions_are_never_lower(self) -> None:
        """Their own dtype, or a higher one that is asked for."""
        with fake_world(0, 2):
            for own, reduce, expected in (
                (FP32, BF16, FP32),
                (BF16, FP32, FP32),
                (FP32, None, FP32),
            ):
                model = wrap(normed().to(own), param_dtype=BF16, reduce_dtype=reduce)
                (norm,) = [
                    b for b in get_unit(model).group.buckets if b.params[0].name == "norm.weight"
                ]
                assert (norm.precision.compute_dtype, norm.precision.reduce_dtype) == (
                    own,
                    expected,
                )

    def test_nothing_stays_wrapped_after_an_error(self) -> None:
        with fake_world(0, 2):
            model = normed()
            model.down.weight = nn.Parameter(model.down.weight.to_sparse())
            with pytest.raises(ValueError, match="sparse"):
                wrap(model, param_dtype=BF16)
            assert type(model.norm) is nn.BatchNorm1d

    def test_compiled_in_one_graph(self) -> None:
        with fake_world(0, 1):
            model = normed()
            inner = model.forward
            model.forward = torch.compile(inner, backend="eager", fullgraph=True)
            wrap(model, (1, 1, 1), param_dtype=BF16)
            assert model(rows(0)).dtype is BF16


def test_gradients_in_half_the_memory() -> None:
    with local_world(2):
        sizes = []
        for keep in (False, True):
            model = wrap(nn.Linear(DIM, DIM), param_dtype=BF16, keep_low_precision_grads=keep)
            model(torch.ones(2, DIM)).sum().backward()
            sizes.append(held_bytes(model.weight.grad.to_local()))
        assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_copied_home_is_what_the_gradient_will_be(keep) -> None:
    """CPU offload."""
    with fake_world(0, 2):
        model = wrap(nn.Linear(DIM, DIM), param_dtype=BF16, keep_low_precision_grads=keep)
        (bucket,) = get_unit(model).group.buckets
        job = Reduction(bucket, [torch.ones(bucket.layout.numel, dtype=BF16)], [])
        CopyToHost().finish(job, None)
        assert job.tensor.dtype is (BF16 if keep else FP32)


def test_freed_at_once() -> None:
    """By reference counts: wrapped modules, both precisions of a bucket, casts of buffers."""
    policy = MixedPrecisionPolicy(
        FP64,
        buffer_dtype=FP64,
        keep_low_precision_grads=True,
        full_precision_in_eval=True,
        full_precision_modules=(nn.LayerNorm,),
    )
    with fake_world(0, 2), collector_off():
        model = parallelize(Net(), cpu_mesh(), mp_policy=policy)
        casts = {}
        for mode in (True, False, True):
            model.train(mode)
            model(rows(0)).sum().backward()
        model.unshard()
        casts["a cast"] = model.layers[0].gain
        others = get_unit(model.layers[0]).group.buckets[0].other_precision
        alive = references(model, **casts, other=others.unsharded)
        del model, casts, others
        assert not [name for name, ref in alive.items() if ref() is not None]


def disagree(field, value):
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(**({field: value} if torch.distributed.get_rank() else {}))
    with pytest.raises(AgreementError, match=field):
        parallelize(Net(), mesh, mp_policy=policy)


def all_disagreements():
    disagree("keep_low_precision_grads", True)
    disagree("full_precision_modules", (nn.LayerNorm,))


def test_ranks_must_agree(gloo_pool) -> None:
    gloo_pool.run(all_disagreements, world_size=2)


# -- buffer_dtype where it meets other things ----------------------------------------------------------


class TestBuffers:
    def test_one_cast_as_long_as_the_buffer_stands_still(self) -> None:
        """One for all that share the buffer, gone with it; a changed one is cast anew."""
        with fake_world(0, 2):
            model = Net()
            model.layers[1].gain = model.layers[0].gain
            parallelize(model, cpu_mesh(), mp_policy=MixedPrecisionPolicy(FP64, buffer_dtype=FP64))
            seen = []
            for layer in model.layers:
                layer.norm.register_forward_pre_hook(
                    lambda _, args, layer=layer: seen.append(layer.gain)
                )
            model(rows(0)), model(rows(0)).sum().backward()
            assert len({id(gain) for gain in seen}) == 1 and seen[0].dtype is FP64
            model.layers[0].gain.mul_(2)
            with torch.inference_mode():
                model(rows(0))
            model(rows(0)).sum().backward()  # what was cast in inference mode can be trained with
            assert seen[-1] is not seen[0] and torch.equal(seen[-1], seen[0] * 2)
            cast = weakref.ref(seen[-1])
            seen.clear()
            model.layers[0].gain = model.layers[1].gain = torch.ones(DIM)
            gc.collect()
            assert cast() is None

    def test_a_module_of_several_units(self) -> None:
        """A table that all layers look things up in is cast until the last of them is through."""
        with fake_world(0, 2):
            mesh = cpu_mesh()
            model = nn.Sequential(nn.Linear(DIM, 4), nn.Linear(DIM, 4))
            table = model[0].table = model[1].table = nn.Module()
            table.register_buffer("values", torch.ones(3))
            original = table.values
            for layer in model:
                fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(buffer_dtype=FP64))
            for change in ("unshard", "reshard"):
                getattr(model[0], change)()
                assert table.values.dtype is FP64
                table.values.mul_(2)
                getattr(model[1], change)()
            assert table.values is original and (original == 4).all()

    def test_what_forward_assigns_or_deletes(self) -> None:
        class Assigns(nn.Linear):
            def forward(self, x):
                self.total = self.total + x.detach().sum()
                self.other = None
                del self.gone
                return super().forward(x)

        with fake_world(0, 2):
            model = Assigns(DIM, 3)
            for name in ("total", "other", "gone"):
                model.register_buffer(name, torch.zeros(()))
            wrap(model, buffer_dtype=FP64)
            model(rows(0))
            assert model.total.dtype is FP32 and model.total == rows(0).sum()
            assert list(model._buffers) == ["total", "other"] and model.other is None

    def test_running_statistics(self) -> None:
        """Batch norm that is not kept in full precision: it writes them unseen by version counters."""
        plain = nn.BatchNorm1d(DIM, dtype=FP64)
        with fake_world(0, 2):
            policy = {"param_dtype": FP64, "buffer_dtype": FP64, "full_precision_modules": ()}
            model = wrap(nn.BatchNorm1d(DIM), **policy)
            mean = model.running_mean
            for sample in range(2):
                model(rows(sample)), plain(rows(sample).double())
                assert model.running_mean is mean and mean.dtype is FP32
                torch.testing.assert_close(mean, plain.running_mean.float())
                torch.testing.assert_close(model.running_var, plain.running_var.float())

    def test_back_after_an_exception(self) -> None:
        with fake_world(0, 2):
            model = wrap(Net(writes=True), buffer_dtype=FP64)
            buffers = dict(model.named_buffers())
            with pytest.raises(RuntimeError):
                model(torch.ones(3, DIM + 1))
            assert all(dict(model.named_buffers())[n] is b for n, b in buffers.items())

    def test_shown_by_unshard_and_not_in_a_state_dict(self) -> None:
        with fake_world(0, 2):
            model = wrap(Net(), buffer_dtype=FP64)
            model.unshard()
            assert model.layers[0].gain.dtype is FP64
            model.layers[0].gain.fill_(3)
            state = model.state_dict()
            assert (state["layers.0.gain"] == 3).all() and state["layers.0.gain"].dtype is FP32
            assert model.double().layers[0].gain.dtype is FP64 and at_rest(model)
