"""What FSDPModule's methods promise beyond torch's: freshness, order, nesting, addresses."""

import copy
from typing import ClassVar

import pytest
import torch
from _support.fsdp.beside_plain import Trial
from _support.fsdp.wrapped import at_rest, buckets, build, cpu_mesh, held_bytes, shard_blocks
from _support.models import Block, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, MixedPrecisionPolicy
from parallel3d.errors import StateError
from parallel3d.fsdp import fully_shard, register_fsdp_forward_method, share_comm_ctx
from parallel3d.fsdp.inspect import get_unit, unit_of
from parallel3d.testing import local_world, record_collectives

parity = pytest.mark.parity


def gathers(recorder):
    return recorder.select("all_gather")


class TestStayingGathered:
    @parity("method: set_reshard_after_forward")
    def test_evaluation_without_gathers_until_the_weights_change(self):
        with local_world(2), torch.no_grad():
            model, mesh = build()
            model.set_reshard_after_forward(False)
            model.set_keep_between_forwards(True)
            first = lm_loss(model, tokens(0))
            with record_collectives(mesh) as recorder:
                assert torch.equal(lm_loss(model, tokens(0)), first)
            assert not gathers(recorder)
            model.layers[0].up.weight.mul_(2)
            with record_collectives(mesh) as recorder:
                assert not torch.equal(lm_loss(model, tokens(0)), first)
            assert [event.unit for event in gathers(recorder)] == ["layers.0"]
            model.set_reshard_after_forward(True)
            lm_loss(model, tokens(0))
            assert at_rest(model)

    @parity("method: unshard")
    def test_a_kept_unit_is_gathered_anew_after_a_step(self):
        with local_world(2), torch.no_grad():
            model, _ = build()
            model.set_reshard_after_forward(False)
            model.unshard()
            before = lm_loss(model, tokens(0))
            sharded = [b.params[0].sharded for b in get_unit(model).group.buckets]
            for p in sharded:
                p.mul_(p)
            assert not torch.equal(lm_loss(model, tokens(0)), before)
            assert not isinstance(model.head.weight, DTensor)


@parity("method: set_modules_to_forward_prefetch")
def test_what_is_no_unit_is_refused():
    with local_world(2):
        model, _ = build()
        with pytest.raises(ValueError, match="LayerNorm, which is not a unit"):
            model.set_modules_to_forward_prefetch([model.norm])
        with pytest.raises(ValueError, match="takes a list of units"):
            model.set_modules_to_backward_prefetch(model.layers[0])


class Recursive(nn.Module):
    """Its forward calls itself, and uses its weight afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        if depth:
            x = self(x, depth - 1)
        return x @ self.linear.weight + self.linear(x)


def test_a_module_that_calls_itself():
    torch.manual_seed(0)
    plain = Recursive()
    with local_world(2):
        model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
        x = torch.randn(3, 4)
        out = model(x)
        torch.testing.assert_close(out, plain(x))
        out.sum().backward()
        plain(x).sum().backward()
        torch.testing.assert_close(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)
        assert at_rest(model)


class WithMethod(Block):
    def encode(self, x):
        return self.up(x) if self.training else self(x) + self.down(self.up(x))

    def fail(self, x):
        raise RuntimeError("as planned")


class TestForwardMethods:
    @parity("function: register_fsdp_forward_method")
    def test_gathers_and_frees_and_gets_gradients(self):
        torch.manual_seed(0)
        plain = WithMethod()
        with local_world(2):
            model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh(), reshard_after_forward=True)
            register_fsdp_forward_method(model, "encode")
            twin = copy.deepcopy(model)
            x = torch.randn(3, 12)
            for each in (model, twin):
                each.encode(x).sum().backward()
                assert at_rest(each)
            plain.encode(x).sum().backward()
            for each in (model, twin):
                grad = each.up.weight.grad.full_tensor()
                torch.testing.assert_close(grad, plain.up.weight.grad)
            model.eval(), plain.eval()  # now it calls forward inside, and computes on
            torch.testing.assert_close(model.encode(x), plain.encode(x))

    @parity("function: register_fsdp_forward_method")
    def test_one_that_raises(self):
        with local_world(2):
            model = fully_shard(WithMethod(), mesh=cpu_mesh())
            register_fsdp_forward_method(model, "fail")
            with pytest.raises(RuntimeError, match="as planned"):
                model.fail(torch.randn(3, 12))
            assert at_rest(model)


def test_one_module_of_a_list_alone_sees_new_weights():
    with local_world(2), torch.no_grad():
        a, b = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], mesh=cpu_mesh())
        x = torch.randn(2, 4)
        before = a(x)
        bucket = unit_of(b).group.buckets[0]
        for param in bucket.params:
            param.sharded.zero_()
        assert not torch.equal(a(x), before)
        assert torch.equal(a(x), torch.zeros(2, 4))


class TestOutsideAForward:
    def test_a_gradient_of_a_parameter_used_by_hand_is_not_left_for_the_next_step(self):
        """``unshard()``, use, backward: no hook of an output has announced that backward."""
        with local_world(2):
            model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
            x = torch.randn(3, 4)
            model(x).sum().backward()
            want = model.weight.grad.full_tensor().clone()
            model.zero_grad()
            model.unshard()
            nn.functional.linear(x, model.weight).sum().backward()  # the bias gets no gradient
            torch.testing.assert_close(model.weight.grad.full_tensor(), want)
            assert model.bias.grad is None
            model.zero_grad()
            model.reshard()
            model(x).sum().backward()
            torch.testing.assert_close(model.weight.grad.full_tensor(), want)

    @parity("function: UnshardHandle")
    def test_a_handle_waited_for_after_reshard_does_nothing(self):
        with local_world(2):
            model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
            handle = model.unshard(async_op=True)
            model.reshard()
            handle.wait()
            assert at_rest(model)

    def test_own_weight_as_an_output(self):
        """Allowed where it stays: the head's weight for a fused loss."""

        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 6)

            def forward(self, x):
                return self.norm(x), self.head.weight

        torch.manual_seed(0)
        plain = Norm()
        x = torch.randn(3, 4)
        with local_world(2):
            model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
            for each in (model, plain):
                hidden, weight = each(x)
                (hidden @ weight.t()).square().sum().backward()
            want = plain.head.weight.grad
            torch.testing.assert_close(model.head.weight.grad.full_tensor(), want)
            with torch.no_grad(), pytest.raises(ValueError, match=r"memory is freed now.*clone"):
                model(x)

    def test_frozen_after_its_forward_gets_no_gradient(self):
        with local_world(2):
            model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
            out = model(torch.randn(3, 4)).sum()
            model.bias.requires_grad_(False)
            out.backward()
            assert model.bias.grad is None and model.weight.grad is not None


class TestEvaluationThenTraining:
    @parity("argument: reshard_after_forward=False")
    def test_false_keeps_for_the_backward_and_the_next_forward_gathers_anew(self):
        """EMA implementations swap weights through ``.data``, which no counter sees."""
        with local_world(2):
            model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(), reshard_after_forward=False)
            with torch.no_grad(), record_collectives(model.weight.device_mesh) as recorder:
                for _ in range(3):
                    model(torch.ones(1, 4))
            assert recorder.count("all_gather") == 3
            model.weight.data.zero_()
            model.bias.data.zero_()
            with record_collectives(model.weight.device_mesh) as recorder:
                out = model(torch.ones(1, 4))
                out.sum().backward()
            assert recorder.count("all_gather") == 1
            assert torch.equal(out.detach(), torch.zeros(1, 4))

    @parity("argument: reshard_after_forward=None")
    def test_the_root_is_gathered_anew_by_default(self):
        """torch keeps it gathered, and stale if the weights change before the next evaluation."""
        with local_world(2), torch.no_grad():
            model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
            model(torch.ones(1, 4))
            assert at_rest(model)
            model.weight.data.zero_()
            model.bias.data.zero_()
            assert torch.equal(model(torch.ones(1, 4)), torch.zeros(1, 4))


class Proxy(nn.Module):
    """Its methods come from ``__getattr__``, as in PEFT's wrappers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def name(cls, x):
        return x + 1

    def __getattr__(self, name):
        if name == "dynamic":
            return lambda x: self.inner(x)
        return super().__getattr__(name)


@parity("function: register_fsdp_forward_method")
@pytest.mark.parametrize("name", ["double", "name", "dynamic"])
def test_methods_that_are_no_functions_of_the_class(name):
    with local_world(2):
        model = fully_shard(Proxy(), mesh=cpu_mesh())
        x = torch.randn(2, 3)
        with torch.no_grad():
            model.unshard()
            want = getattr(model, name)(x)
            model.reshard()
            register_fsdp_forward_method(model, name)
            torch.testing.assert_close(getattr(model, name)(x), want)


@parity("function: share_comm_ctx")
def test_sharing_completes_what_is_in_flight():
    with local_world(2):
        model, _ = build()
        other, _ = build()
        reference, _ = build()
        model.set_is_last_backward(False)
        lm_loss(model, tokens(0)).backward()
        share_comm_ctx([other, model])
        model.set_is_last_backward(True)
        lm_loss(model, tokens(1)).backward()
        for index in range(2):
            lm_loss(reference, tokens(index)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor())
        other.set_reduce_scatter_max_input_buffers(3)
        lm_loss(other, tokens(0)).backward()
        lm_loss(model, tokens(0)).backward()
        assert unit_of(model).context.comm.max_inputs == 3


def test_complex_parameters():
    torch.manual_seed(0)
    plain = nn.Linear(3, 3, dtype=torch.complex64)
    plain.bias.requires_grad_(False)
    x = torch.randn(2, 3, dtype=torch.complex64)
    with local_world(2):
        model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
        for each in (model, plain):
            each(x).abs().sum().backward()
        got = model.weight.grad.full_tensor()
        torch.testing.assert_close(got, plain.weight.grad)


# -- set_keep_unsharded_storage: one address for the model's life, and free to autograd as ever --------


PARITY = pytest.mark.parity("method: set_keep_unsharded_storage")
FSDP, HSDP, REPLICATE = MeshLayout(1, 2, 1), MeshLayout(2, 2, 1), MeshLayout(2, 1, 1)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def addresses(model: nn.Module) -> list[list[int]]:
    return [
        [inner.data_ptr() for inner in bucket.precision.unsharded._local_tensors.values()]
        for bucket in buckets(model)
    ]


def held(model: nn.Module) -> list[bool]:
    """Of each bucket whose unsharded parameters are no shards: whether they have memory."""
    own = [bucket for bucket in buckets(model) if bucket.precision.has_own_unsharded]
    return [held_bytes(bucket.precision.unsharded) > 0 for bucket in own]


@PARITY
@pytest.mark.parametrize("layout", [FSDP, HSDP, REPLICATE], ids=["fsdp", "hsdp", "ddp"])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_addresses_stay_and_numbers_are_the_plain_models(layout, reshard) -> None:
    with local_world(layout.world_size) as world:
        trial = Trial(
            world, layout, lambda m, mesh: shard_blocks(m, mesh, reshard_after_forward=reshard)
        )
        trial.model.set_keep_unsharded_storage(True)
        trial.backward(0)
        first = addresses(trial.model)
        assert all(held(trial.model))
        trial.check([0])
        trial.step()
        for step in range(1, 4):
            trial.backward(step)
            assert addresses(trial.model) == first
            trial.check([step])
            trial.step()
        with torch.no_grad():
            trial.forward(4)
        assert addresses(trial.model) == first
        trial.model.set_keep_unsharded_storage(False)
        assert at_rest(trial.model)
        assert not any(held(trial.model))
        trial.backward(5)
        trial.check([5])
        assert not any(held(trial.model))


@PARITY
def test_of_one_unit_or_all_inside() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        trial.model.set_keep_unsharded_storage(True, recurse=False)
        trial.backward(0)
        own = [bucket for bucket in buckets(trial.model) if bucket.precision.has_own_unsharded]
        assert [bucket.unit for bucket in own if held_bytes(bucket.precision.unsharded)] == ["Net"]
        with pytest.raises(ValueError, match="keep"):
            trial.model.set_keep_unsharded_storage("yes")


@PARITY
@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": BF16},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True)},
        {"reshard_after_forward": 2},
        {"shard_optimizer_over_replicate": True},
    ],
    ids=["bf16", "eval", "smaller", "hfsdp"],
)
def test_with_other_options(options) -> None:
    """As the same model without it, and at one address."""
    layout = MeshLayout(1, 4, 1) if "reshard_after_forward" in options else HSDP
    grads = []
    for keep in (False, True):
        with local_world(4) as world:
            trial = Trial(world, layout, lambda m, mesh: shard_blocks(m, mesh, **options))
            trial.model.set_keep_unsharded_storage(keep)
            found = []
            for batch in range(3):
                trial.backward(batch)
                trial.model.eval()
                with torch.no_grad():
                    trial.forward(batch)
                trial.model.train()
                trial.backward(batch)
                found.append(addresses(trial.model))
            assert not keep or found[0] == found[1] == found[2]
            grads.append([inner for p in trial.model.parameters() for inner in locals_of(p.grad)])
            trial.model.set_keep_unsharded_storage(False)
            assert not any(held(trial.model))
            for bucket in buckets(trial.model):
                other = bucket.other_precision
                if other is not None and other.has_own_unsharded:
                    assert held_bytes(other.unsharded) == 0
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def locals_of(grad) -> list[torch.Tensor]:
    return list(grad._local_tensor._local_tensors.values())


class Hoarder(nn.Module):
    """Leaves what it has computed where the engine does not look."""

    hoard: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Hoarder.hoard = [self.linear(x).tanh() @ self.linear.weight]
        return x * 2


@PARITY
def test_what_is_kept_is_free_to_autograd() -> None:
    """A backward that the engine is not told of reads memory that is there: an error all the same."""
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_hoarder, build=lambda: nn.Sequential(Hoarder()))
        trial.model.set_keep_unsharded_storage(True)
        trial.forward(0)
        assert all(held(trial.model))
        with pytest.raises(StateError, match="reads parameters of the unit while they are freed"):
            Hoarder.hoard.pop().square().mean().backward()


def shard_hoarder(model: nn.Module, mesh) -> nn.Module:
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@PARITY
def test_weights_that_change_between_forward_and_backward() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        trial.model.set_keep_unsharded_storage(True)
        out = trial.forward(0)
        with torch.no_grad():
            for param in trial.model.parameters():
                param.mul_(2)
        with pytest.raises(StateError, match="changed"):
            out.backward()


@PARITY
def test_a_copy_keeps_its_own() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        trial.model.set_keep_unsharded_storage(True)
        trial.backward(0)
        before = addresses(trial.model)
        original, other = trial.model, copy.deepcopy(trial.model)
        trial.model = other
        trial.model.zero_grad()
        trial.backward(1)
        trial.check([1])
        assert all(held(other))
        assert not set(map(tuple, before)) & set(map(tuple, addresses(other)))
        assert all(held(original))  # so that no memory of it was given to the copy
