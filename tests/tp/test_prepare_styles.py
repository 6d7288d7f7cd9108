"""Styles that give a module's input or output on in another layout, and those for raw parameters."""

import pytest
import torch
from _support.tp.prepared_models import Latent, Sinks
from _support.tp.tp_models import DIM, GatedMlp, Mlp
from _support.tp.tp_world import check_parity, tp_mesh
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequence
from torch.nn import functional as F

from parallel3d.errors import PlanError
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import (
    Colwise,
    LocalParams,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    RopeOutput,
    Rowwise,
    SequenceParallel,
    parse_style,
    resolve_plan,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---- outputs ----


class Sums(nn.Module):
    """Puts out parts when its children's inputs are split: no style of its own sums them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Parameter(torch.randn(hidden, DIM))

    def forward(self, x: Tensor) -> tuple[str, Tensor]:
        return "first", F.gelu(self.up(x)) @ self.down


class Second(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[1]


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_split_parameter_of_a_module_and_its_output_summed(tp):
    rules = (("down", Colwise()),)
    plan = {"inner.up": "colwise", "inner": LocalParams(rules), "": PrepareOutput()}
    check_parity(Second(Sums(13)), plan, tp, floats(2, 5, DIM))
    plan[""] = PrepareOutput(wanted="sequence")
    check_parity(Second(Sums(13)), plan, tp, floats(2, 5, DIM), sequence_out=True)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("length", [6, 5])
def test_an_output_split_and_gathered_along_the_sequence(tp, length):
    model = nn.Sequential(nn.Linear(DIM, 4), nn.LayerNorm(4))
    plan = {"0": PrepareOutput("replicate", "sequence"), "1": "sequence_parallel"}
    check_parity(model, plan, tp, floats(2, length, DIM), sequence_out=True)
    plan[""] = PrepareOutput("sequence", "replicate")
    check_parity(model, plan, tp, floats(2, length, DIM))


@pytest.mark.parametrize("tp", [2, 4])
def test_an_outputs_features_split_and_gathered(tp):
    model = nn.Sequential(nn.Linear(DIM, 7), nn.ReLU(), nn.Linear(7, DIM))
    plan = {"0": PrepareOutput("replicate", "shard"), "2": "rowwise"}
    check_parity(model, plan, tp, floats(2, 3, DIM))
    model = nn.Sequential(nn.Linear(DIM, 7), nn.ReLU())
    plan = {"0": "colwise", "1": PrepareOutput("shard", "replicate", features=7)}
    check_parity(model, plan, tp, floats(2, 3, DIM))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: PrepareOutput("sequence", "shard"),
            "is not possible; it can be partial -> replicate",
        ),
        (lambda: PrepareOutput("shard", "replicate"), "features is the size"),
        (lambda: PrepareOutput("partial", "whole"), "wanted must be one of"),
        (lambda: resolve_plan(nn.Linear(2, 2), {"": "all_reduce"}, 2), "which are used on parts"),
        (lambda: PrepareInput(keywords=(("mask", "copy"),)), r"\(name, layout\)"),
        (
            lambda: resolve_plan(Mlp(8), {"": PrepareInput(keywords=("mask",))}, 2),
            "Mlp.forward has no argument 'mask'; it has x",
        ),
    ],
)
def test_what_prepare_refuses(make, said):
    with pytest.raises(PlanError, match=said):
        make()


# ---- inputs ----


class Cross(nn.Module):
    """Reads two sequences and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(DIM, 8), nn.Linear(DIM, 8)
        self.o = nn.Linear(8, DIM)

    def forward(
        self, x: Tensor, scale: float, memory: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        y = self.q(x) * self.k(memory) * scale
        return self.o(y) if bias is None else self.o(y) + bias


CROSS = {"q": Colwise(input="gathered"), "k": Colwise(input="gathered"), "o": "rowwise"}


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, memory: model(x, 2.0, memory),
        lambda model, x, memory: model(x, 2.0, memory=memory),
        lambda model, x, memory: model(memory=memory, scale=2.0, x=x),
    ],
)
def test_several_inputs_however_they_are_given(call):
    plan = {**CROSS, "": PrepareInput(keywords=("memory",))}
    check_parity(Cross(), plan, 2, floats(2, 3, DIM), floats(2, 3, DIM), call=call)


class Gated(Cross):
    """With a parameter for each hidden feature, and one for each of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(DIM))

    def forward(
        self, x: Tensor, scale: float, memory: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self.o(self.q(x * self.scale) * self.k(memory) * self.gate.sigmoid())


def test_parameters_of_a_module_whose_input_is_prepared():
    plan = {**CROSS, "": PrepareInput(keywords=("memory",)), "gate": "colwise"}
    with pytest.raises(PlanError, match="scale of Gated has no rule"):
        resolve_plan(Gated(), plan, 2)
    plan["scale"] = "replicated_with_grad_allreduce"
    x, memory = floats(2, 3, DIM), floats(2, 3, DIM)
    check_parity(Gated(), plan, 2, x, memory, call=lambda model, x, m: model(x, 1.0, m))


class Encoded(nn.Module):
    """A whole memory read by a module that gets a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Identity()
        self.cross = Cross()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.cross(self.enter(x), 1.0, memory)


@pytest.mark.parametrize("length", [4, 5])
def test_inputs_of_two_layouts(length):
    plan = {f"cross.{name}": style for name, style in CROSS.items()}
    plan |= {
        "enter": SequenceParallel(input="replicate"),
        "cross": PrepareInput("sequence", keywords=(("memory", "replicate"),)),
        "cross.o": Rowwise(output="sequence"),
    }
    x, memory = floats(2, length, DIM), floats(2, length, DIM)
    check_parity(Encoded(), plan, 2, x, memory, sequence_out=True)


class Gate(nn.Module):
    """Computes something from its input alike on every rank, and something split."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 1)
        self.mlp = GatedMlp(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.router(x).sigmoid() + x.mean(1, keepdim=True)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("length", [6, 5])
def test_a_block_that_needs_the_whole_sequence_between_parts_of_it(tp, length):
    model = nn.Sequential(nn.LayerNorm(DIM), Gate(), nn.LayerNorm(DIM))
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1": PrepareInputOutput(
            "sequence", wanted="whole", output=PrepareOutput("replicate", "sequence")
        ),
        "1.mlp.gate": "colwise",
        "1.mlp.up": "colwise",
        "1.mlp.down": "rowwise",
        "2": "sequence_parallel",
    }
    check_parity(model, plan, tp, floats(2, length, DIM), sequence_out=True)


# ---- raw parameters ----


def test_parameters_split_by_heads():
    plan = {
        "q": Colwise(multiple_of=3),
        "o": Rowwise(multiple_of=3),
        "": "local_params",
        "sinks": "colwise",
        "scale": "replicated_with_grad_allreduce",
    }
    check_parity(Sinks(4, 3), plan, 4, floats(2, 5, DIM))
    check_parity(Sinks(4, 3), plan, 2, floats(2, 5, DIM))


def test_each_raw_parameter_needs_a_rule():
    plan = {"q": "colwise", "o": "rowwise", "": "local_params", "sinks": "colwise"}
    with pytest.raises(
        PlanError, match=r"scale of Sinks has no rule: .*used with this rank's heads"
    ):
        resolve_plan(Sinks(4, 3), plan, 2)


# ---- multi-head latent attention ----


@pytest.mark.parametrize("tp", [2, 4])
def test_compressed_keys_and_values(tp):
    plan = {
        "1.q": Colwise(multiple_of=5),
        "1.kv_a": "mla_kv_a_proj",
        "1.kv_b": Colwise(multiple_of=6),
        "1.o": Rowwise(multiple_of=3),
    }
    model = nn.Sequential(nn.LayerNorm(DIM), Latent(4, 3))
    check_parity(model, plan, tp, floats(2, 5, DIM))
    resolved = resolve_plan(model, plan, tp)
    assert resolved.modules[1].style == RopeOutput(2)


def test_the_size_of_what_goes_to_all_heads_must_be_known():
    with pytest.raises(PlanError, match="nor the model's config has a qk_rope_head_dim"):
        resolve_plan(Mlp(8), {"up": "mla_kv_a_proj"}, 2)


def test_prepared_modules_on_one_rank_are_the_plain_ones():
    model = Mlp(8)
    with fake_world(0, 1):
        resolve_plan(model, {"": PrepareOutput("replicate", "shard")}, 1).apply(model, tp_mesh(1))
        assert model(torch.ones(2, DIM)).shape == (2, DIM)


def test_what_random_numbers_are_drawn_on_after_it():
    # See parallel3d/tp/random.py: masks differ between ranks on parts and are alike on whole tensors.
    assert PrepareOutput().random_after == "whole"
    assert Colwise(input="sequence", output="replicate").random_after == "whole"
    assert Colwise(output="replicate").random_after == ""
    assert PrepareOutput("replicate", "shard").random_after == "features"
    given = PrepareOutput("replicate", "sequence")
    assert given.random_after == PrepareInputOutput(output=given).random_after == "sequence"
    assert given.splits_sequence and PrepareInputOutput(output=given).splits_sequence
    assert parse_style("moe_tp_experts").random_after == "whole"
    assert parse_style("moe_tp_experts").random_before
    assert parse_style(ColwiseParallel()).random_after == "features"
    assert parse_style(ColwiseParallel(output_layouts=Replicate())).random_after == "whole"
    assert parse_style(RowwiseParallel(output_layouts=Shard(1))).random_after == "sequence"
    assert parse_style(TorchSequence(use_local_output=True)).random_after == "sequence"
    assert parse_style(TorchSequence()).random_after == ""
    assert (
        parse_style(
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        ).random_after
        == ""
    )


class OfTwo(nn.Module):
    """What is prepared isn't its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(8)

    def forward(self, name: str | None, x: Tensor, scale: float) -> Tensor:
        assert name == "first"
        return self.mlp(x) * scale


def test_what_comes_before_the_first_tensor_is_kept():
    plan = {"": PrepareInput(), "mlp.up": Colwise(input="gathered"), "mlp.down": "rowwise"}
    check_parity(OfTwo(), plan, 2, floats(2, 3, DIM), call=lambda m, x: m("first", x, 2.0))


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return self.kept


def test_an_output_that_its_module_keeps_is_not_overwritten():
    with fake_world(0, 2):
        model = Keeping()
        resolve_plan(model, {"": "all_reduce"}, 2).apply(model, tp_mesh(2))
        y = model(torch.ones(2, DIM, requires_grad=True))
        assert y.data_ptr() != model.kept.data_ptr()


class OneOfThree(nn.Module):
    def forward(self, x: Tensor) -> list[object]:
        return ["first", x * 2, "last"]


def test_what_is_beside_an_output_is_kept():
    with fake_world(0, 2):
        model = OneOfThree()
        resolve_plan(model, {"": PrepareOutput("replicate", "sequence")}, 2).apply(
            model, tp_mesh(2)
        )
        first, y, last = model(torch.ones(2, 4, DIM))
        assert (first, last, y.shape) == ("first", "last", (2, 2, DIM))


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mlp = nn.Parameter(torch.randn(DIM)), Mlp(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x + self.mlp(x)


def test_what_every_rank_computes_alike_from_a_whole_input():
    style = PrepareInput(wanted="whole")
    assert style.traffic(Scaling(), 2) == ()
    assert style.plan(Scaling(), 2).keys() == {"scale"}
    plan = {"": style, "mlp.up": "colwise", "mlp.down": "rowwise"}
    check_parity(Scaling(), plan, 2, floats(2, 3, DIM))
