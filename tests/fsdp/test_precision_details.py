"""Precision policies where they meet other things: batch norm, memory, ties, exceptions, other units."""

import copy
import gc
import weakref

import pytest
import torch
from extended import Bf16, extend
from lifetimes import collector_off, references
from precision_twins import DIM, Net, rows
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from wrapped import at_rest, held_bytes

from parallel3d import (
    AgreementError,
    MeshLayout,
    MixedPrecisionPolicy,
    StateError,
    build_mesh,
    parallelize,
)
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.members import the_unit
from parallel3d.fsdp.offload import copy_home
from parallel3d.testing import fake_world, local_world, record_collectives

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def wrap(module, layout=(1, 2, 1), **options):
    """``module`` as one unit; what is no argument of fully_shard is of the policy."""
    arguments = {"reshard_after_forward", "shard_optimizer_over_replicate", "mp_policy"}
    policy = {key: value for key, value in options.items() if key not in arguments}
    rest = {key: value for key, value in options.items() if key in arguments}
    rest.setdefault("mp_policy", MixedPrecisionPolicy(**policy))
    return fully_shard(module, mesh=build_mesh(MeshLayout(*layout), device_type="cpu"), **rest)


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
            (bucket,) = the_unit(model).group.buckets
            assert bucket.compute_dtype is BF16 and type(model.norm) is nn.BatchNorm1d

    def test_without_mixed_precision_it_costs_nothing(self) -> None:
        with fake_world(0, 2):
            model = wrap(normed())
            assert type(model.norm) is nn.BatchNorm1d
            assert len(the_unit(model).group.buckets) == 1

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
            buckets = the_unit(model).group.buckets
            assert {b.compute_dtype for b in buckets} == {FP32}  # all are inside the outer one
            block = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
            model = nn.ModuleDict({"a": nn.Linear(DIM, DIM), "b": block})
            block[0].weight = model["a"].weight
            holder = nn.Module()
            holder.inner = model
            wrap(holder, param_dtype=BF16, full_precision_modules=(nn.Sequential,))
            names = {
                b.compute_dtype: [p.name for p in b.params] for b in the_unit(holder).group.buckets
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
                    b for b in the_unit(model).group.buckets if b.params[0].name == "norm.weight"
                ]
                assert (norm.compute_dtype, norm.reduce_dtype) == (own, expected)

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


class TestBuffers:
    def test_one_cast_as_long_as_the_buffer_stands_still(self) -> None:
        """One for all that share the buffer, gone with it; a changed one is cast anew."""
        with fake_world(0, 2):
            model = Net()
            model.layers[1].gain = model.layers[0].gain
            mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
            parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(FP64, buffer_dtype=FP64))
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
            mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
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
            (bucket,) = the_unit(model).group.buckets
            low = bucket.unsharded
            mesh = model.weight.device_mesh
            x = torch.ones(2, DIM)
            assert bucket.other_precision is None  # built when it is asked for
            with record_collectives(mesh) as recorder, torch.no_grad():
                model(x)
                assert held_bytes(low) == 2 * 2 * DIM * DIM
                model.eval()
                model(x), model(x)
                assert held_bytes(low) == 0 and held_bytes(bucket.unsharded) == 2 * 4 * DIM * DIM
                model.train()
                model(x)
            assert [call.bytes for call in recorder.select("all_gather")] == [
                2 * DIM * DIM,
                4 * DIM * DIM,
                2 * DIM * DIM,
            ]
            assert bucket.unsharded is low
            model.reshard()
            assert at_rest(model) and held_bytes(bucket.other_precision["unsharded"]) == 0

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
            (bucket,) = the_unit(model).group.buckets
            assert (bucket.unsharded is bucket.flat) == (layout[1] == 1)
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
            mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
            policy = MixedPrecisionPolicy(BF16, buffer_dtype=BF16, full_precision_in_eval=True)
            model = parallelize(Net(), mesh, mp_policy=policy)
            model.layers[1].eval()
            model(rows(0)).sum().backward()
            assert [layer.seen[0][:2] for layer in model.layers] == [(BF16, BF16), (FP32, FP32)]

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
        (bucket,) = the_unit(model).group.buckets
        home = copy_home(bucket, torch.ones(bucket.numel, dtype=BF16))
        assert home.dtype is (BF16 if keep else FP32)


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
        mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
        model = parallelize(Net(), mesh, mp_policy=policy)
        casts = {}
        for mode in (True, False, True):
            model.train(mode)
            model(rows(0)).sum().backward()
        model.unshard()
        casts["a cast"] = model.layers[0].gain
        others = the_unit(model.layers[0]).group.buckets[0].other_precision
        alive = references(model, **casts, other=others["unsharded"])
        del model, casts, others
        assert not [name for name, ref in alive.items() if ref() is not None]


def disagree(field, value):
    mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
    policy = MixedPrecisionPolicy(**({field: value} if torch.distributed.get_rank() else {}))
    with pytest.raises(AgreementError, match=field):
        parallelize(Net(), mesh, mp_policy=policy)


def all_disagreements():
    disagree("keep_low_precision_grads", True)
    disagree("full_precision_modules", (nn.LayerNorm,))


def test_ranks_must_agree(gloo_pool) -> None:
    gloo_pool.run(all_disagreements, world_size=2)
