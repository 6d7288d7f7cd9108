"""Modules kept in full precision, batch norm first; gradients in low precision; what ranks must agree on."""

import pytest
import torch
from _support.fsdp.lifetimes import collector_off, references
from _support.fsdp.precision_twins import DIM, Net, rows, wrap
from _support.fsdp.wrapped import cpu_mesh, held_bytes
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from parallel3d import (
    AgreementError,
    MixedPrecisionPolicy,
    parallelize,
)
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.options.offload import CopyToHost
from parallel3d.fsdp.reduction import Reduction
from parallel3d.testing import fake_world, local_world

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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
            assert {b.precision.compute_dtype for b in buckets} == {
                FP32
            }  # all are inside the outer one
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
