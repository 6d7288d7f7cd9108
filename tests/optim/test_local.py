"""optim.local: the plain model's steps, on plain local tensors, with DTensors to be seen."""

import copy
import functools
import pickle

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.optim.local_sides import Counting, Sides, everything, matrices
from _support.optim.normed import Normed
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallel3d import MeshError, MeshLayout, StateError, build_mesh, parallelize
from parallel3d.fsdp import fully_shard
from parallel3d.optim import local
from parallel3d.testing import fake_world, local_world, record_collectives, shards_of

ELEMENTWISE = [
    (optim.AdamW, {}),
    (optim.Adam, {"amsgrad": True, "foreach": False, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {}),  # no state at all
    (optim.Adagrad, {"initial_accumulator_value": 0.5}),  # has state before its first step
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"lr": 0.0}),
    (optim.AdamW, {"maximize": True, "foreach": True}),
    (optim.ASGD, {"t0": 1, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1, "fused": True}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.Rprop, {"etas": (0.4, 1.3)}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "classes"),
    [((2, 2, 1), ELEMENTWISE), ((1, 2, 2), ELEMENTWISE[:9:4])],
    ids=["hsdp", "tp"],
)
def test_every_elementwise_optimizer_of_torch(sizes, classes) -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes))
        sides.backward()
        for cls, options in classes:
            options = {"lr": 1e-2, **options}
            sides.reset()
            sides.optimizers(
                everything,
                functools.partial(cls, **options),
                functools.partial(local, cls, **options),
            )
            assert isinstance(sides.optimizer, cls)
            for _ in range(2):
                sides.step()
            sides.check(moved=options["lr"] > 0)


class TestTraining:
    """Forwards, backwards and steps, with what surrounds them."""

    @pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
    def test_groups_schedule_and_flat_buffers(self, sizes) -> None:
        def groups(model: nn.Module) -> list[dict]:
            """The blocks whole; of the rest, biases apart: their buckets are split."""
            rest = [p for n, p in model.named_parameters() if "layers" not in n]
            return [
                {"params": list(model.layers.parameters()), "weight_decay": 0.1},
                {"params": [p for p in rest if p.dim() == 2], "lr": 3e-3},
                {"params": [p for p in rest if p.dim() == 1]},
            ]

        with local_world(4) as world:
            sides = Sides(world, MeshLayout(*sizes), layers=2)
            sides.optimizers(
                groups,
                functools.partial(optim.AdamW, lr=1e-2),
                functools.partial(local, Counting, elementwise=True, lr=1e-2),
            )
            schedules = [
                optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.5)
                for each in (sides.plain_optimizer, sides.optimizer)
            ]
            for step in range(3):
                sides.backward(step)
                grads = [p.grad for p in sides.model.layers[0].parameters()]
                sides.step()
                assert [p.grad for p in sides.model.layers[0].parameters()] == grads
                sides.zero_grad()
                for schedule in schedules:
                    schedule.step()
            sides.check()
            optimizer = sides.optimizer
            assert [len(tensors) for tensors in optimizer.given] == [2, 2, 3]
            assert not any(issubclass(kind, DTensor) for kind in optimizer.kinds)
            assert optimizer.param_groups[1]["lr"] == 3e-3 / 8
            assert [p for g in optimizer.param_groups for p in g["params"]] == [
                p for g in groups(sides.model) for p in g["params"]
            ]
            assert all(p.grad is None for group in optimizer.given for p in group)

    def test_frozen_missing_and_accumulated(self) -> None:
        """A gradient that is missing once divides a flat buffer: its step count stays behind."""
        with local_world(4) as world:
            sides = Sides(world, MeshLayout(1, 2, 2), layers=2)
            for model in (sides.plain, sides.model):
                model.layers[1].norm.weight.requires_grad_(False)
            sides.optimizers(
                everything,
                functools.partial(optim.AdamW, lr=1e-2),
                functools.partial(local, Counting, elementwise=True, lr=1e-2),
            )
            for step in range(4):
                sides.backward(step)
                sides.backward(step + 4)
                if step == 1:
                    for model in (sides.plain, sides.model):
                        model.layers[0].up.bias.grad = None
                if step == 3:  # a gradient of the user's own
                    for model in (sides.plain, sides.model):
                        model.layers[0].up.bias.grad = model.layers[0].up.bias.grad * 2
                sides.step()
                sides.zero_grad()
                if not step:
                    assert len(sides.optimizer.given[0]) < 12  # a flat buffer among them
            sides.check()
            bias = sides.optimizer.state[sides.model.layers[0].up.bias]
            assert bias["step"] == 3 and "step" not in sides.optimizer.state.get(
                sides.model.layers[1].norm.weight, {}
            )

    def test_gradients_that_change_places(self) -> None:
        """They are the bucket's, and the user has put them elsewhere."""

        def change(model: nn.Module, step: int) -> None:
            first, second = model.layers[0].norm.parameters()
            if step == 0:
                first.grad, second.grad = second.grad, first.grad
            else:
                first.grad = second.grad

        with local_world(2) as world:
            sides = Sides(world, MeshLayout(1, 2, 1))
            sgd = functools.partial(optim.SGD, lr=0.1)
            sides.optimizers(everything, sgd, functools.partial(local, optim.SGD, lr=0.1))
            for step in range(2):
                sides.backward(step)
                with world.paused():
                    change(sides.plain, step)
                change(sides.model, step)
                if step == 0:
                    sides.backward(3)  # adds to them
                sides.step()
                sides.zero_grad()
                sides.check(moved=False)

    @pytest.mark.slow
    def test_state_from_a_plain_model_and_a_conversion(self) -> None:
        """Whole tensors are cut, edits of the state are seen, and buckets may be built anew."""
        with local_world(4) as world:
            sides = Sides(world, MeshLayout(1, 2, 2))
            sides.optimizers(
                everything,
                functools.partial(optim.AdamW, lr=1e-2),
                functools.partial(local, optim.AdamW, lr=1e-2),
            )
            sides.backward()
            sides.step()
            with world.paused():
                saved = copy.deepcopy(sides.plain_optimizer.state_dict())
            for entry in saved["state"].values():
                entry["exp_avg"] = entry["exp_avg"] * 3
            for optimizer in (sides.plain_optimizer, sides.optimizer):
                optimizer.load_state_dict(copy.deepcopy(saved))
            sides.step()
            sides.check()
            for model, optimizer in (
                (sides.plain, sides.plain_optimizer),
                (sides.model, sides.optimizer),
            ):
                state = optimizer.state[model.layers[0].up.weight]
                state["exp_avg_sq"] = state["exp_avg_sq"] * 2  # replaced
                optimizer.state[model.layers[0].down.weight]["exp_avg"].mul_(5)  # in place
                optimizer.state[model.layers[0].norm.bias]["step"].add_(3)
                optimizer.state[model.head.weight].clear()
            sides.step()
            sides.check()
            assert sides.optimizer.state[sides.model.layers[0].norm.bias]["step"] == 6
            assert sides.optimizer.state[sides.model.layers[0].norm.weight]["step"] == 3
            with world.paused():
                sides.plain.layers[0].float().double()
            sides.model.layers[0].float().double()
            sides.zero_grad()
            sides.backward(1)
            sides.step()
            sides.check()


# One rank of a world: what it is made of


def on_one_rank(sizes: tuple[int, int, int], **options) -> tuple[Lm, Counting]:
    torch.manual_seed(0)
    model = parallelize(Lm(vocab=20), build_mesh(MeshLayout(*sizes), device_type="cpu"))
    return model, local(Counting, model, elementwise=True, lr=1e-2, **options)


def test_memory_and_number_of_tensors() -> None:
    with fake_world(0, 4):
        model, optimizer = on_one_rank((2, 2, 1))
        mesh = model.head.weight.device_mesh
        lm_loss(model, tokens(0)).backward()
        grads = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        with record_collectives(mesh) as recorder:
            optimizer.step()
        assert not recorder.calls
        # Embedding, two blocks, norm and head: one tensor each, whose gradient is the reduced buffer itself.
        assert [len(group) for group in optimizer.given] == [4]
        assert {g.untyped_storage().data_ptr() for g in optimizer.grads[0]} == grads
        # The state has one element for each of the shards', once.
        for key in ("exp_avg", "exp_avg_sq"):
            shown = [optimizer.state[p][key] for p in model.parameters()]
            assert all(isinstance(s, DTensor) for s in shown)
            flat = [s[key] for s in optimizer._local.state.values()]
            assert sum(f.numel() for f in flat) == sum(
                p.to_local().numel() for p in model.parameters()
            )
            inside = {f.untyped_storage().data_ptr(): f.untyped_storage().nbytes() for f in flat}
            for each in shown:
                start = each.to_local().data_ptr()
                assert any(p <= start < p + size for p, size in inside.items())
        # Saving one parameter's state does not drag the buffer into the file.
        entry = optimizer.state[model.norm.bias]["exp_avg"].to_local()
        assert entry.untyped_storage().nbytes() == entry.numel() * 4
        objects = [id(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
        optimizer.step()
        assert [id(optimizer.state[p]["exp_avg"]) for p in model.parameters()] == objects


def test_new_group_and_ignored_parameter() -> None:
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
        model = Lm(vocab=20, layers=1)
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.norm.weight})
        optimizer = local(Counting, model.layers.named_parameters(), elementwise=True, lr=1e-2)
        lm_loss(model, tokens(0)).backward()
        optimizer.step()
        assert [len(g) for g in optimizer.given] == [1]
        optimizer.add_param_group({"params": [("norm", model.norm.weight)], "lr": 0.5})
        before = model.norm.weight.detach().clone()
        optimizer.step()
        assert [len(g) for g in optimizer.given] == [1, 1]
        assert optimizer.given[1][0] is model.norm.weight  # plain as it is
        assert (model.norm.weight - before).abs().max() > 0.1
        assert type(optimizer.state[model.norm.weight]["exp_avg"]) is torch.Tensor
        assert optimizer.state[model.layers[0].up.bias]["step"] == 2


def test_hooks_closures_and_copies() -> None:
    calls = []
    with fake_world(0, 2):
        model, _ = on_one_rank((1, 2, 1))
        optimizer = local(optim.AdamW, model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(
            lambda o, *_: calls.append(o.param_groups[0]["params"][0])
        )
        handle = register_optimizer_step_post_hook(lambda *_: calls.append("all"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = lm_loss(model, tokens(0))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        handle.remove()
        assert loss.item() > 0
        assert calls[0] == "before" and calls[1] is model.embed.weight and calls[2:] == ["all"]
        assert optimizer.state[model.norm.bias]["exp_avg"].to_local().abs().max() > 0

    plain = nn.Linear(3, 2)
    optimizer = local(optim.AdamW, plain)
    plain(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is type(optimizer) is not optim.AdamW
        (group,) = again.param_groups
        for p, q in zip(group["params"], plain.parameters(), strict=True):
            p.grad = q.grad.clone()
        before = again.state[group["params"][0]]["exp_avg"].clone()
        again.step()
        assert again.state[group["params"][0]]["step"] == 2
        assert not torch.equal(again.state[group["params"][0]]["exp_avg"], before)


def test_an_exception_puts_everything_back() -> None:
    class Failing(optim.SGD):
        fail = False

        def step(self, closure=None):
            if self.fail:
                raise ZeroDivisionError
            return super().step(closure)

    with fake_world(0, 2):
        torch.manual_seed(0)
        model = parallelize(Lm(vocab=20), build_mesh(MeshLayout(shard=2), device_type="cpu"))
        optimizer = local(Failing, model, elementwise=True, lr=0.1)
        lm_loss(model, tokens(0)).backward()
        optimizer.fail = True
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
        optimizer.fail = False
        optimizer.step()


@pytest.mark.parametrize(("cls", "of"), [(optim.AdamW, everything), (optim.Muon, matrices)])
def test_a_sum_that_waits_is_no_gradient(cls, of) -> None:
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
        model = parallelize(Lm(), mesh, LM_PLAN)
        optimizer = local(cls, of(model))
        with model.no_sync():
            lm_loss(model, tokens(0)).backward()
        with pytest.raises(StateError, match="last micro-batch"):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == of(model)


class Odd(nn.Module):
    """A scalar, and vectors of one and of seven."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale + self.one)


@pytest.mark.parametrize(
    ("cls", "moment"),
    [(optim.AdamW, "exp_avg"), (optim.Adagrad, "sum")],
    ids=["", "state at first"],
)
def test_scalars_and_empty_shards(cls, moment) -> None:
    torch.manual_seed(0)
    plain = Odd().double()
    model = copy.deepcopy(plain)
    x = torch.randn(3, 4, dtype=torch.float64)
    plain_optimizer = cls(plain.parameters(), lr=1e-2)
    with local_world(2) as world:
        fully_shard(model, mesh=build_mesh(MeshLayout(shard=2), device_type="cpu"))
        optimizer = local(cls, model, lr=1e-2)
        for step in range(3):
            with world.paused():
                plain(x).square().sum().backward()
                plain_optimizer.step()
            model(world.map(lambda r: x)).square().sum().backward()
            optimizer.step()
            if step == 1:
                saved = copy.deepcopy(plain_optimizer.state_dict())
                for entry in saved["state"].values():
                    entry[moment] *= 2
                for each in (plain_optimizer, optimizer):
                    each.load_state_dict(copy.deepcopy(saved))
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
        with world.paused():
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                pairs = {
                    key: (v, optimizer.state[q][key]) for key, v in plain_optimizer.state[p].items()
                }
                for key, (whole, shards) in {"weight": (p, q), **pairs}.items():
                    for rank, box, part in shards_of(shards.detach()):
                        message = f"{key} of {name} on rank {rank}"
                        torch.testing.assert_close(
                            part, whole.detach()[box], rtol=0, atol=1e-12, msg=message
                        )


def test_dtensors_of_torchs_tensor_parallelism() -> None:
    """No unit has them: each is stepped on by itself; whole state is cut as they are."""
    with fake_world(1, 2):
        mesh = build_mesh(MeshLayout(tp=2), device_type="cpu")["tp"]
        torch.manual_seed(0)
        plain = nn.Linear(3, 5)
        model = copy.deepcopy(plain)
        for name, p in plain.named_parameters():
            mine = DTensor.from_local(
                p.detach()[3:].clone(), mesh, [Shard(0)], shape=p.shape, stride=p.stride()
            )
            setattr(model, name, nn.Parameter(mine))
        optimizers = [
            make(each.parameters(), lr=1e-2)
            for make, each in (
                (optim.AdamW, plain),
                (functools.partial(local, Counting, elementwise=True), model),
            )
        ]
        for step in range(2):
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.grad = torch.full_like(p, 1.0 + step)
                q.grad = torch.full_like(q, 1.0 + step)
            for optimizer in optimizers:
                optimizer.step()
            if not step:
                saved = copy.deepcopy(optimizers[0].state_dict())
                for entry in saved["state"].values():
                    entry["exp_avg"] *= 2
                for optimizer in optimizers:
                    optimizer.load_state_dict(copy.deepcopy(saved))
        assert [len(group) for group in optimizers[1].given] == [2]
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(q.to_local(), p.detach()[3:])
            moment = optimizers[1].state[q]["exp_avg"]
            assert moment.placements == (Shard(0),)
            assert torch.equal(moment.to_local(), optimizers[0].state[p]["exp_avg"][3:])


# Optimizers that need whole parameters


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_the_plain_models_steps(sizes) -> None:
    """Rows shared unevenly, vectors, tp before shard, and fewer parameters of a shape than ranks."""
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), layers=2)
        for model in (sides.plain, sides.model):
            model.layers[0].norm.weight.requires_grad_(False)
        sides.optimizers(everything, Normed, functools.partial(local, Normed))
        for step in range(2):
            sides.backward(step)
            if step:
                for model in (sides.plain, sides.model):
                    model.layers[1].up.weight.grad = None  # its step count stays behind
            sides.step()
            sides.zero_grad()
        sides.check()
        state = sides.optimizer.state[sides.model.layers[0].up.weight]
        assert isinstance(state["momentum"], DTensor) and not isinstance(state["row"], DTensor)
        assert sides.optimizer.param_groups[0]["calls"] == sides.optimizer.steps == 2
        assert sides.optimizer.state["of no parameter"] == {"steps": 2}
        if sizes == (1, 2, 2):
            assert state["momentum"].placements == sides.model.layers[0].up.weight.placements


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_muon_and_adafactor(sizes) -> None:
    """torch's Muon computes in bfloat16: equal inputs give equal results, to the bit."""
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), layers=2)
        sides.backward()
        for cls, of in ((optim.Muon, matrices), (optim.Adafactor, everything)):
            sides.reset()
            sides.optimizers(
                of, functools.partial(cls, lr=1e-2), functools.partial(local, cls, lr=1e-2)
            )
            assert isinstance(sides.optimizer, cls)
            for _ in range(2):
                sides.step()
            sides.check(moved=False)
            weight = sides.model.layers[0].up.weight
            assert not all(
                torch.equal(a, b)
                for a, b in zip(
                    world.per_rank(weight), world.per_rank(sides.shards[2]), strict=True
                )
            )


@pytest.mark.slow
def test_state_of_the_plain_model_is_cut() -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(1, 2, 2))
        sides.optimizers(everything, Normed, functools.partial(local, Normed))
        sides.backward()
        sides.step()
        kept = sides.optimizer.state[sides.model.head.weight]["momentum"]
        sides.step()  # in the same memory
        assert sides.optimizer.state[sides.model.head.weight]["momentum"] is kept
        with world.paused():
            saved = copy.deepcopy(sides.plain_optimizer.state_dict())
        sides.optimizer.load_state_dict(saved)
        sides.step()
        sides.check(moved=False)  # biases of zero have norm zero


def test_what_is_communicated() -> None:
    """Each rank sends what it holds, twice or thrice: no parameter is gathered by every rank."""
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
        model = parallelize(Lm(layers=8, vocab=20), mesh)
        chosen = [p for n, p in model.named_parameters() if n.endswith("up.weight")]
        optimizer = local(optim.Muon, chosen)
        lm_loss(model, tokens(0)).backward()
        whole = 20 * 12 * 4
        # Weight and gradient there, both back with the momentum; then it goes there too.
        for transfers in (4, 5):
            with record_collectives(mesh) as recorder:
                optimizer.step()
            assert {(c.op, c.axis) for c in recorder.calls} == {("all_to_all", "shard")}
            # Eight parameters, four ranks: two rounds.
            assert len(recorder.calls) == 2 * transfers
            assert all(c.bytes <= whole for c in recorder.calls)
        for param in chosen:
            momentum = optimizer.state[param]["momentum_buffer"]
            assert momentum.placements == param.placements and momentum.placements[1] == Shard(0)
            assert momentum.to_local().numel() == 5 * 12


def test_nothing_is_communicated_where_nothing_is_shared() -> None:
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(2, 1, 1), device_type="cpu")
        model = parallelize(Lm(), mesh)
        optimizer = local(optim.Muon, matrices(model))
        lm_loss(model, tokens(0)).backward()
        before = model.head.weight.to_local().clone()
        with record_collectives(mesh) as recorder:
            optimizer.step()
        assert not recorder.calls
        assert not torch.equal(model.head.weight.to_local(), before)
        assert isinstance(optimizer.state[model.head.weight]["momentum_buffer"], DTensor)


def test_the_argument_and_the_attribute() -> None:
    plain = nn.Linear(3, 2)
    plain(torch.ones(1, 3)).sum().backward()

    class Unmarked(Normed):
        whole_matrix = False

    for cls, matrix in ((Normed, None), (Unmarked, True)):
        optimizer = local(cls, plain, matrix=matrix)
        optimizer.step(lambda: plain(torch.ones(1, 3)).sum())
        assert optimizer.state[plain.weight]["step"] == 1
    with pytest.raises(ValueError, match="Muon steps on matrices"):
        local(optim.Muon, plain)


def test_axes_without_names() -> None:
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, (Shard(0), Shard(0))))
        optimizer = local(optim.Muon, [weight])
        weight.grad = weight.detach().clone()
        with pytest.raises(MeshError, match=r"shape \(8, 4\).*name them"):
            optimizer.step()


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)], ids=str)
def test_elementwise_and_whole(sizes) -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), shard_optimizer_over_replicate=True)
        for cls in (functools.partial(optim.AdamW, lr=1e-2), Normed):
            base = getattr(cls, "func", cls)
            sides.reset()
            sides.optimizers(everything, cls, functools.partial(local, base, lr=1e-2))
            for step in range(2):
                sides.backward(step)
                sides.step()
                sides.zero_grad()
            sides.check()
        up = sides.model.layers[0].up.weight
        momentum = sides.optimizer.state[up]["momentum"]
        assert all(not placement.is_replicate() for placement in momentum.placements[:1])
        parts = world.per_rank(momentum)
        assert {tuple(part.shape) for part in parts} == {(5, 12)}
        assert not torch.equal(parts[0], parts[2])  # of the two replicas
