"""buffer_dtype where it meets other things: caching, sharing, assignment, exceptions, state dicts."""

import gc
import weakref

import pytest
import torch
from _support.fsdp.precision_twins import DIM, Net, rows, wrap
from _support.fsdp.wrapped import at_rest, cpu_mesh
from torch import nn

from parallel3d import MixedPrecisionPolicy, parallelize
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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
