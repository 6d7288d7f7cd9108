"""full_precision_in_eval where it meets other things: memory, unshard, inference mode, other options."""

import copy

import pytest
import torch
from _support.extended import Bf16, extend
from _support.fsdp.precision_twins import DIM, Net, rows, wrap
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes
from torch import nn

from parallel3d import MixedPrecisionPolicy, StateError, parallelize
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world, local_world, record_collectives

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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
