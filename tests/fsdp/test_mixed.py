"""Sharded parameters beside plain tensors, outside their unit's forward: penalties, and what errors say."""

import copy
import itertools
import subprocess
import sys

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from _support.models import Lm
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput

from parallel3d import MeshLayout, Parallel3dError, StateError, build_mesh, parallelize
from parallel3d.fsdp import fully_shard, register_fsdp_forward_method
from parallel3d.fsdp.inspect import explain_mixed
from parallel3d.testing import assert_parity, fake_world

LAYOUTS = {
    "shard": MeshLayout(1, 3, 1),
    "replicate": MeshLayout(2, 1, 1),
    "hsdp": MeshLayout(2, 2, 1),
    "tp": MeshLayout(1, 2, 2),
}


def small():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def inputs(index):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(index))


def mse(model, x):
    return nn.functional.mse_loss(model(x), x[:, :4])


def penalty(model):
    return 1e-2 * sum(p.square().sum() for p in model.parameters())


PENALTIES = {
    "before": lambda model, x: penalty(model) + mse(model, x),
    "after": lambda model, x: mse(model, x) + model[0].weight.norm() * 0.1,
    "less": lambda model, x: mse(model, x) - model[2].weight.abs().mean(),
    "per row": lambda model, x: (model(x).square().mean(1) + penalty(model)).mean(),
    "weighted": lambda model, x: mse(model, x) + penalty(model) * torch.tensor(0.5),
    "twice": lambda model, x: (penalty(model) + mse(model, x)) / 2 + penalty(model),
    # Gradients are the mean of what each rank's loss has, also where the penalty is no summand.
    "times": lambda model, x: mse(model, x) * penalty(model),
    "divided": lambda model, x: penalty(model) / mse(model, x),
    "logarithm": lambda model, x: (mse(model, x) + penalty(model)).log() + penalty(model),
}


class TestPenalties:
    @pytest.mark.parametrize(
        ("loss", "layout"),
        [("before", layout) for layout in LAYOUTS]
        + [*zip(list(PENALTIES)[1:], itertools.cycle(LAYOUTS))],
    )
    def test_as_plain(self, loss, layout):
        loss, layout = PENALTIES[loss], LAYOUTS[layout]
        plan = {"tp_plan": {"0": "colwise", "2": "rowwise"}} if layout.tp > 1 else {}
        assert_parity(small, inputs, layout, loss=loss, steps=2, fp32=False, **plan)

    def test_accumulated(self):
        options = {"micro_batches": 2, "steps": 2, "fp32": False}
        assert_parity(small, inputs, MeshLayout(2, 2, 1), loss=PENALTIES["before"], **options)

    def test_a_number_that_is_a_parameter(self):
        """Outside its unit, as CLIP's loss multiplies logits by the scale."""

        def build():
            model = small()
            model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
            return model

        def loss(model, x):
            return (model(x) * model.scale.exp()).square().mean()

        assert_parity(build, inputs, MeshLayout(2, 2, 1), loss=loss, steps=2, fp32=False)


def sharded(world_size=2, model=None, **options):
    return fully_shard(
        model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        mesh=cpu_mesh(1, world_size),
        **options,
    )


OUTSIDE = {
    "minus": lambda weight: weight - torch.ones(4, 4),
    "reflected": lambda weight: torch.ones(4, 4) * weight,
    "matmul": lambda weight: torch.ones(2, 4) @ weight.detach(),
    "in place": lambda weight: weight.detach().__iadd__(torch.ones(4, 4)),
}


@pytest.mark.parametrize("compute", OUTSIDE.values(), ids=OUTSIDE)
def test_operators_name_the_parameter_and_the_line(compute):
    with fake_world(0, 2):
        model = sharded()
        name = (
            "parameter 0.weight of unit Sequential is sharded"
            if compute is OUTSIDE["minus"]
            else ""
        )
        with pytest.raises(StateError, match=name + r".*\(.*test_mixed.py:\d+\).*full_tensor\(\)"):
            compute(model[0].weight)
        weight = model[0].weight
        weight - distribute_tensor(torch.ones(4, 4), weight.device_mesh, weight.placements)


@pytest.mark.parametrize("write", ["__iadd__", "__isub__", "mul_"])
def test_a_penalty_added_in_place(write):
    with fake_world(0, 2):
        model = sharded()
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(
            StateError, match=r"test_mixed.py:\d+.*loss = loss \+ penalty, not in place"
        ):
            getattr(loss, write)(model[0].weight.square().sum())


PROGRAM = """
import torch
from torch import nn
from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard, register_fsdp_forward_method
from parallel3d.fsdp.inspect import explain_mixed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(4, 4), mesh=build_mesh(MeshLayout(), device_type="cpu"))
weight = model.weight
torch.lerp(torch.ones(4, 4), weight, 0.1)
"""


@pytest.mark.slow
def test_uncaught_errors_have_a_note():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert "parameter weight of unit Linear is sharded, a DTensor, and was used" in done.stderr


class Writer(nn.Module):
    """Its method calls a module inside, which is no unit, as generate of an adapter's model does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))

    def forward(self, ids):
        return self.body(ids)

    def write(self, ids):
        return self.body(ids)


def test_a_method_other_than_forward():
    ids = torch.arange(4)
    with fake_world(0, 2):
        model = Writer()
        fully_shard(model, mesh=build_mesh(MeshLayout(1, 2, 1)))
        with pytest.raises(RuntimeError) as caught:
            model.write(ids)
        said = explain_mixed(caught.value)
        assert 'register_fsdp_forward_method(model, "write")' in said
        register_fsdp_forward_method(model, "write")
        assert model.write(ids).shape == (4, 8)
        with pytest.raises(RuntimeError) as caught:
            model.body(ids)
        assert "register_fsdp_forward_method" not in explain_mixed(caught.value)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("nested", [False, True])
def test_an_input_that_is_a_dtensor(nested):
    """torch's style hands it on by default; the plain weight inside is none of the unit's fault."""
    model = nn.Sequential(Inner(), nn.Sequential(Inner()) if nested else Inner())
    prepare = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
    )
    with fake_world(0, 2):
        plan = {"0": prepare, "0.up": "colwise", "0.down": "rowwise"}
        parallelize(model, cpu_mesh(1, 1, 2), tp_plan=plan, units=["0", "1"])
        with pytest.raises(
            StateError, match=r"\(FSDPInner\) was given a DTensor as 'x'.*use_local_output=True"
        ):
            model(torch.ones(2, 4))


class TestOptimizers:
    @pytest.mark.parametrize("how", ["foreach", "fused"])
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam])
    def test_ignored_parameters(self, kind, how):
        if kind is torch.optim.NAdam:
            how = "foreach"  # it has no other
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = torch.randn(3, 4)
        with fake_world(0, 1):
            model = copy.deepcopy(plain)
            sharded(1, model, ignored_params={model[0].bias, model[1].weight})
            for each in (model, plain):
                optimizer = kind(each.parameters(), lr=0.1, weight_decay=0.1, **{how: True})
                for _ in range(2):
                    optimizer.zero_grad()
                    each(x).square().sum().backward()
                    optimizer.step()
            for name, p in plain.named_parameters():
                q = model.get_parameter(name)
                torch.testing.assert_close(q.to_local() if isinstance(q, DTensor) else q, p)

    def test_states_of_a_plain_model(self):
        with fake_world(0, 2):
            plain, model = nn.Linear(4, 4), sharded(2, nn.Linear(4, 4))
            before, after = (torch.optim.AdamW(m.parameters()) for m in (plain, model))
            for each in (plain, model):
                each(torch.ones(2, 4)).sum().backward()
            before.step()
            after.load_state_dict(before.state_dict())
            with pytest.raises(
                StateError, match=r"'exp_avg' of parameter weight of unit Linear is a plain"
            ):
                after.step()

    @pytest.mark.parametrize("how", [{}, {"foreach": True}], ids=str)
    def test_a_model_converted_after_the_first_step(self, how):
        with fake_world(0, 2):
            model = sharded(2, nn.Linear(4, 4).bfloat16())
            optimizer = torch.optim.AdamW(model.parameters(), **how)
            model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            model.float()
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(
                StateError, match=r"'exp_avg' of parameter weight .* is torch.bfloat16, and"
            ):
                optimizer.step()

    def test_errors_of_the_users_are_theirs(self):
        class Own(torch.optim.SGD):
            def step(self, closure=None):
                raise RuntimeError("mine")

        with fake_world(0, 2), pytest.raises(RuntimeError, match=r"^mine$"):
            Own(sharded().parameters(), lr=0.1).step()


class TestLoading:
    def check(self, state, match, model=None):
        model = model or sharded()
        with pytest.raises(StateError, match=match) as raised:
            model.load_state_dict(state(model))
        assert "mixed torch" not in str(raised.value) and len(str(raised.value).splitlines()) < 4

    def test_whole_values(self):
        with fake_world(0, 2):
            plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
            self.check(
                lambda _: plain, r"0.weight .* and 3 more: a plain tensor.*load_model_state_dict"
            )

    def test_one_ranks_shards(self):
        def shards(model):
            return {name: value.to_local() for name, value in model.state_dict().items()}

        with fake_world(0, 2):
            self.check(
                shards, r"0.weight \(shape \(2, 4\).* and 3 more: one rank's shard.*checkpoint.save"
            )

    def test_another_mesh(self):
        with fake_world(0, 2):
            other = fully_shard(
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=cpu_mesh(2, 1)
            ).state_dict()
            self.check(lambda _: other, "of another mesh, .*checkpoint.save and load")

    @pytest.mark.parametrize("rows", [3, 9])
    def test_another_vocabulary(self, rows):
        with fake_world(0, 2):
            model = sharded(2, nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4)))
            given = {**model.state_dict(), "0.weight": torch.zeros(rows, 4)}
            if rows == 3:  # as many as a rank's shard has
                self.check(lambda _: given, "one rank's shard", model)
            else:
                self.check(lambda _: given, "another shape. Resize the plain model", model)

    def test_other_errors_stay(self):
        with fake_world(0, 2), pytest.raises(RuntimeError, match="Missing key"):
            sharded().load_state_dict({})


class TestRefused:
    @pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
    def test_sparse_gradients(self, make):
        with fake_world(0, 2):
            with pytest.raises(
                Parallel3dError, match=r"parameter 0.weight of .*\(sparse=True\).*sparse=False"
            ):
                sharded(2, nn.Sequential(make(6, 4, sparse=True), nn.Linear(4, 4)))
            frozen = make(6, 4, sparse=True).requires_grad_(False)
            sharded(2, nn.Sequential(frozen, nn.Linear(4, 4)))

    @pytest.mark.parametrize("root", [True, False])
    def test_resizing_an_embedding(self, root):
        class Resizable(Lm):
            def resize_token_embeddings(self, new_num_tokens):
                self.embed = nn.Embedding(new_num_tokens, 12)

        with fake_world(0, 2):
            model = Resizable() if root else nn.Sequential(Resizable())
            parallelize(model, cpu_mesh())
            for each in (model, copy.deepcopy(model)):
                resizable = each if root else each[0]
                with pytest.raises(StateError, match="resize the plain model, before parallelize"):
                    resizable.resize_token_embeddings(24)
