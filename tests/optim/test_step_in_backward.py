"""step_in_backward: the plain optimizer's weights, few gradients at a time, or an error."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.side_by_side import Sides, side_by_side
from _support.stepped import build, local
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from parallel3d import (
    MeshLayout,
    MixedPrecisionPolicy,
    build_mesh,
    optim,
    parallelize,
)
from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import units_of
from parallel3d.optim.local import LocalState
from parallel3d.testing import fake_world, record_collectives


def groups(model: nn.Module) -> list[dict]:
    """Biases don't decay; the head is in both, by its two parameters."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def check_training(
    sizes: tuple[int, int, int],
    build: Callable[[], nn.Module] = Lm,
    optimizer_class: Callable = torch.optim.AdamW,
    apply: Callable | None = None,
    **options,
) -> None:
    """Groups, a schedule, and after each step no gradient left."""
    with side_by_side(sizes, build, apply) as sides:
        plain = adamw(groups(sides.plain))
        ours = optim.step_in_backward(
            sides.model, optimizer_class, params=groups(sides.model), lr=1e-2, **options
        )
        schedules = [halving(plain), halving(ours)]
        for step in range(3):
            sides.step_plain(plain, step)
            sides.loss(step).backward()
            assert all(p.grad is None for p in sides.model.parameters())
            for schedule in schedules:
                schedule.step()
            sides.check()
        assert ours.param_groups[0]["lr"] == 1e-2 / 8
        assert [len(g["params"]) for g in ours.param_groups] == [
            len(g["params"]) for g in plain.param_groups
        ]


TIED = functools.partial(Lm, layers=1, tied=True)


def train_apart(sides: Sides) -> None:
    """All of the plain steps first: any optimizer's step lets gathered weights be gathered anew."""
    plain = adamw(sides.plain.parameters())
    optim.step_in_backward(sides.model, torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        sides.step_plain(plain, step)
    for step in range(3):
        sides.loss(step).backward()
    sides.check()


class TestWeights:
    @pytest.mark.parametrize(
        "sizes", [(2, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)], ids=str
    )
    def test_as_of_the_plain_optimizer(self, sizes) -> None:
        check_training(sizes)

    @pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)], ids=str)
    def test_of_an_optimizer_on_local_tensors(self, sizes, monkeypatch) -> None:
        """And shards over replicate too. What it steps on is put together once for each bucket."""
        made, buckets = [], []
        init = LocalState.__init__
        monkeypatch.setattr(LocalState, "__init__", lambda *a: made.append(init(*a)))

        def apply(model, mesh):
            plan = LM_PLAN if sizes[2] > 1 else None
            parallelize(model, mesh, plan, shard_optimizer_over_replicate=True)
            buckets.extend(b for unit in units_of(model, True) for b in unit.group.buckets)
            return model

        local_adamw = functools.partial(optim.local, torch.optim.AdamW)
        check_training(sizes, functools.partial(Lm, layers=1), local_adamw, apply)
        assert len(made) == len(buckets)

    def test_what_is_counted_in_groups(self) -> None:
        """Once a backward, not once a bucket."""

        class Slower(torch.optim.Optimizer):
            def __init__(self, params, lr: float) -> None:
                super().__init__(params, {"lr": lr, "steps": 0})

            def step(self, closure=None) -> None:
                for group in self.param_groups:
                    group["steps"] += 1
                    for p in group["params"]:
                        if p.grad is not None:
                            p.data.sub_(p.grad, alpha=group["lr"] / group["steps"])

        with side_by_side((1, 2, 1), Lm) as sides:
            plain = Slower(groups(sides.plain), lr=0.1)
            ours = optim.step_in_backward(sides.model, Slower, params=groups(sides.model), lr=0.1)
            for step in range(2):
                sides.step_plain(plain, step)
                sides.loss(step).backward()
            sides.check()
            assert [g["steps"] for g in ours.param_groups] == [2, 2]

    def test_on_processes(self, gloo_pool) -> None:
        """Tied, and a fused optimizer."""
        fused = functools.partial(check_training, fused=True)
        gloo_pool.run(fused, (2, 2, 1), TIED, world_size=4)

    @pytest.mark.parametrize("reshard", [True, False], ids=["", "kept gathered"])
    def test_shared_and_checkpointed_units(self, reshard) -> None:
        """A block that runs twice, recomputed; gathered weights are not taken for the new ones."""

        class Twice(Lm):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = self.embed(ids)
                for layer in [*self.layers, self.layers[0]]:
                    x = checkpoint(layer, x, use_reentrant=False)
                return self.head(self.norm(x))

        def apply(model, mesh):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
            model.set_reshard_after_backward(reshard)
            return model

        with side_by_side((1, 2, 1), Twice, apply) as sides:
            train_apart(sides)

    @pytest.mark.slow
    def test_units_that_are_left_at_the_end_of_the_backward(self) -> None:
        """A parameter that gets no gradient; what stays gathered are the weights from before."""

        def build() -> Lm:
            model = Lm()
            for layer in model.layers:
                layer.unused = nn.Parameter(torch.ones(3))
            return model

        def apply(model, mesh):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
            model.set_reshard_after_backward(False)
            return model

        with side_by_side((1, 2, 1), build, apply) as sides:
            train_apart(sides)

    def test_without_a_shard_axis(self) -> None:
        """Where forward computes with the shards themselves."""

        def apply(model, mesh):
            return parallelize(model, mesh)

        with side_by_side((2, 1, 1), functools.partial(Lm, layers=1), apply) as sides:
            plain = torch.optim.SGD(sides.plain.parameters(), lr=0.1, momentum=0.9)
            optim.step_in_backward(sides.model, torch.optim.SGD, lr=0.1, momentum=0.9)
            for step in range(2):
                sides.step_plain(plain, step)
                sides.loss(step).backward()
            sides.check()

    def test_some_parameters_only(self) -> None:
        """The others keep their gradients; a frozen one, and one that gets none, stay."""
        with side_by_side((1, 2, 1), functools.partial(Lm, layers=1)) as sides:
            for model in (sides.plain, sides.model):
                model.norm.weight.requires_grad_(False)
            chosen = [p for n, p in sides.model.named_parameters() if "up" in n or "norm" in n]
            optim.step_in_backward(sides.model, torch.optim.SGD, params=chosen, lr=0.1)
            with sides.outside():
                sides.plain_loss(0).backward()
                stepped = [p for n, p in sides.plain.named_parameters() if "up" in n or "norm" in n]
                torch.optim.SGD(stepped, lr=0.1).step()
                for p in stepped:
                    p.grad = None
            sides.loss(0).backward()
            sides.check()
            ids = {id(p) for p in chosen}
            for name, p in sides.model.named_parameters():
                assert (p.grad is None) == (id(p) in ids), name


class Peak(TorchDispatchMode):
    """Most bytes of storages made in its body: by how much each is larger than at ``reset``."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.before: dict[int, int] = {}
        self.most = 0

    def sizes(self) -> dict[int, int]:
        self.alive = {key: ref for key, ref in self.alive.items() if not ref.expired()}
        self.before = {key: size for key, size in self.before.items() if key in self.alive}
        return {key: size_of(ref) for key, ref in self.alive.items()}

    def reset(self) -> None:
        self.most, self.before = 0, self.sizes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        given = {ref.cdata for ref in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = {ref.cdata: ref for ref in storages(result)}
        self.alive |= {
            key: made[key] for key in made.keys() - given | made.keys() & self.alive.keys()
        }
        sizes = self.sizes().items()
        more = (size - self.before.get(key, 0) for key, size in sizes)
        self.most = max(self.most, sum(each for each in more if each > 0))
        return result


def storages(value) -> list[StorageWeakRef]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [StorageWeakRef(t.untyped_storage()) for t in leaves if isinstance(t, torch.Tensor)]


def size_of(ref: StorageWeakRef) -> int:
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()


class TestMemory:
    def peak(self, layers: int, in_backward: bool) -> int:
        """Bytes that a backward makes at its worst moment; the second, when states are there."""
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
            model = parallelize(Lm(dim=64, hidden=96, layers=layers), mesh)
            if in_backward:
                optim.step_in_backward(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            with Peak() as peak:
                lm_loss(model, tokens(0)).backward()
                model.zero_grad()
                loss = lm_loss(model, tokens(0))
                peak.reset()
                loss.backward()
            return peak.most

    @pytest.mark.slow
    def test_it_does_not_grow_with_the_model(self) -> None:
        """Eight blocks more need no byte more; without it they need their gradients."""
        shard = sum(p.numel() for p in Lm(dim=64, hidden=96, layers=1).layers.parameters()) * 4 // 2
        in_backward, usual = self.peak(12, True), self.peak(4, False)
        assert in_backward == self.peak(4, True)
        assert self.peak(12, False) - usual == 8 * shard
        # Less than with four blocks' reduced gradients: one is used, and two are reduced.
        assert in_backward < usual

    def test_gradients_alive_at_each_update(self) -> None:
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
            model = parallelize(Lm(layers=6), mesh)
            optimizer = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
            alive: list[int] = []

            def count(*_) -> None:
                alive.append(sum(p.grad is not None for p in model.parameters()))

            optimizer.register_step_post_hook(count)
            lm_loss(model, tokens(0)).backward()
            assert len(alive) == 8  # embedding, blocks, norm and head
            assert max(alive) == len(list(model.layers[0].parameters()))

    @pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
    def test_the_order_of_collectives_stays(self, sizes) -> None:
        calls = []
        for in_backward in (False, True):
            with fake_world(0, 4):
                mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
                model = parallelize(Lm(layers=3), mesh, LM_PLAN if sizes[2] > 1 else None)
                if in_backward:
                    optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
                with record_collectives(mesh) as recorder:
                    lm_loss(model, tokens(0)).backward()
                calls.append(recorder.calls)
        assert calls[0] == calls[1]

    def test_deleted_it_is_gone_at_once(self) -> None:
        """No cycle through the model, its units and the optimizer."""
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
            model = parallelize(Lm(layers=1), mesh)
            optimizer = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
            lm_loss(model, tokens(0)).backward()
            gone = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(optimizer.optimizer)]
            gc.disable()
            try:
                del model, optimizer
                assert [ref() is None for ref in gone] == [True] * len(gone)
            finally:
                gc.enable()


class TestHooks:
    def test_on_parameters(self) -> None:
        """They see the reduced gradient, before the update."""
        with fake_world(0, 2):
            model, _ = build()
            weight = model.layers[0].up.weight
            before, seen = local(weight).clone(), []

            def look(param: torch.Tensor) -> None:
                assert torch.equal(local(param), before)
                seen.append(local(param.grad).clone())

            weight.register_post_accumulate_grad_hook(look)
            lm_loss(model, tokens(0)).backward()
            torch.testing.assert_close(local(weight).detach(), before - 0.1 * seen[0])

    @pytest.mark.slow
    def test_second_derivatives(self) -> None:
        """A penalty on the gradient of an input: the graph is used twice, by one backward of parameters."""

        class Smooth(Lm):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = self.embed(ids)
                y = self.layers[0](x)
                (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                return self.head(self.norm(self.layers[1](y + slope)))

        def apply(model, mesh):
            for each in (*model.layers, model):
                fully_shard(each, mesh=mesh)
            return model

        with side_by_side((1, 2, 1), Smooth, apply) as sides:
            plain = adamw(sides.plain.parameters())
            optim.step_in_backward(sides.model, torch.optim.AdamW, lr=1e-2)
            for step in range(2):
                sides.step_plain(plain, step)
                sides.loss(step).backward()
                sides.check()


class TestState:
    def test_saved_and_loaded(self) -> None:
        """Into a fresh optimizer, as torch's own and by torch's checkpoint functions."""
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = parallelize(Lm(layers=1), mesh)
            saving = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
            lm_loss(model, tokens(0)).backward()
            saved, by_name = saving.state_dict(), get_optimizer_state_dict(model, saving)
            averages = saved["state"][0]["exp_avg"]
            assert averages.placements == next(iter(model.parameters())).placements
            saving.remove()
            fresh = optim.step_in_backward(model, torch.optim.AdamW, lr=0.3)
            fresh.load_state_dict(saved)
            assert fresh.param_groups[0]["lr"] == 0.1
            assert torch.equal(local(fresh.state_dict()["state"][0]["exp_avg"]), local(averages))
            fresh.remove()
            fresh = optim.step_in_backward(model, torch.optim.AdamW, lr=0.3)
            before = [local(p).clone() for p in model.parameters()]
            set_optimizer_state_dict(model, fresh, by_name)
            for p, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(local(p), old) and p.grad is None
            again = get_optimizer_state_dict(model, fresh)
            assert again["param_groups"] == by_name["param_groups"]
            for name, state in by_name["state"].items():
                for key, value in state.items():
                    assert torch.equal(local(again["state"][name][key]), local(value)), (name, key)
            lm_loss(model, tokens(1)).backward()
            assert fresh.state_dict()["state"][0]["step"] == 2

    def test_a_copy_is_not_updated(self) -> None:
        """copy.deepcopy of the model, as a frozen teacher."""
        with fake_world(0, 2):
            model, _ = build()
            twin = copy.deepcopy(model)
            lm_loss(twin, tokens(0)).backward()
            assert all(p.grad is not None for p in twin.parameters())

    def test_loaded_by_the_optimizer_that_updates(self) -> None:
        with fake_world(0, 2):
            model, optimizer = build(momentum=0.9)
            lm_loss(model, tokens(0)).backward()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.optimizer.load_state_dict(copy.deepcopy(saved))
            lm_loss(model, tokens(1)).backward()
            assert optimizer.state is optimizer.optimizer.state
            assert optimizer.param_groups is optimizer.optimizer.param_groups
            for index, entry in optimizer.state_dict()["state"].items():
                was, now = (
                    local(each["momentum_buffer"]) for each in (saved["state"][index], entry)
                )
                assert not torch.equal(was, now)

    def test_mixed_precision(self) -> None:
        """Reduced in bfloat16, updated in float32."""
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model = parallelize(Lm(layers=1), mesh, mp_policy=policy)
            optimizer = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
            lm_loss(model, tokens(0)).backward()
            assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.float32
