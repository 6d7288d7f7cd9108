"""nn.MultiheadAttention split by heads, with each of its options, against itself; torch's transformers."""

import copy

import pytest
import torch
from _support.tp.tp_world import check_parity, on_ranks, same
from torch import nn

from parallel3d.errors import PlanError
from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.testing.worlds import local_world
from parallel3d.tp import SplitHeads, auto_plan, resolve_plan
from parallel3d.tp.auto.prove import Proof, Prover
from parallel3d.tp.auto.trace import FirstCall

E = 24


def _randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.double()


def check(attention: nn.MultiheadAttention, *inputs: torch.Tensor, **options: object) -> None:
    """Outputs, weights and all gradients on two simulated ranks are those of the plain module."""
    given = list({id(x): x for x in inputs}.values())
    places = [next(i for i, y in enumerate(given) if y is x) for x in inputs]

    def call(model: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        outputs = model["attn"](*(given[i] for i in places), **options)
        return torch.cat([t.flatten() for t in outputs if t is not None])

    model = _randomized(nn.ModuleDict({"attn": attention}))
    check_parity(model, {"attn": "attention"}, 2, *given, call=call)


def _tokens(length: int, batch_first: bool, features: int = E) -> torch.Tensor:
    shape = (2, length, features) if batch_first else (length, 2, features)
    return torch.randn(shape, dtype=torch.float64)


def _options() -> list[dict]:
    """Pairwise-ish: every value of every option, combined at random but always alike."""
    values = {
        "batch_first": (True, False),
        "need_weights": (True, False),
        "average_attn_weights": (True, False),
        "mask": (None, "bool", "float", "heads", "heads bool", "causal"),
        "padding": (None, "bool", "float"),
        "bias": (True, False),
        "add_bias_kv": (True, False),
        "add_zero_attn": (True, False),
        "inputs": ("self", "key = value", "all differ", "kdim"),
    }
    generator = torch.Generator().manual_seed(0)

    def pick(choices: tuple) -> object:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    return [{name: pick(v) for name, v in values.items()} for _ in range(40)]


def _case(case: dict, heads: int) -> tuple[nn.MultiheadAttention, list, dict]:
    different = case["inputs"] == "kdim"
    attention = nn.MultiheadAttention(
        E,
        heads,
        bias=case["bias"],
        add_bias_kv=case["add_bias_kv"],
        add_zero_attn=case["add_zero_attn"],
        kdim=10 if different else None,
        vdim=14 if different else None,
        batch_first=case["batch_first"],
    )
    length, keys = 5, 5 if case["inputs"] == "self" else 7
    query = _tokens(length, case["batch_first"])
    key = query if case["inputs"] == "self" else _tokens(keys, case["batch_first"])
    value = key
    if case["inputs"] == "all differ":
        value = _tokens(keys, case["batch_first"])
    elif different:
        key, value = _tokens(keys, case["batch_first"], 10), _tokens(keys, case["batch_first"], 14)
    options = {n: case[n] for n in ("need_weights", "average_attn_weights")}
    masked = torch.rand(2 * heads, length, keys) < 0.4
    masked[..., 0] = False
    options["attn_mask"] = {
        None: None,
        "bool": masked[0],
        "float": torch.randn(length, keys).double(),
        "heads": torch.randn(2 * heads, length, keys).double(),
        "heads bool": masked,
        "causal": torch.ones(length, keys, dtype=torch.bool).triu(1),
    }[case["mask"]]
    options["is_causal"] = case["mask"] == "causal"
    padding = torch.zeros(2, keys, dtype=torch.bool)
    padding[1, -2:] = True
    options["key_padding_mask"] = {None: None, "bool": padding, "float": padding.double() * -3}[
        case["padding"]
    ]
    return attention, [query, key, value], options


def _proof(number: int, heads: int, tp: int) -> Proof:
    torch.manual_seed(number)
    attention, inputs, options = _case(_options()[number], heads)
    outputs = [frozenset[str]()] * (1 + options["need_weights"])
    call = FirstCall(tuple(inputs), options, {id(x) for x in inputs}, outputs)
    return Prover(attention, call, tp).prove({"": SplitHeads()})


@pytest.mark.parametrize("number", range(40))
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_every_option_equals_the_plain_module(number: int) -> None:
    proof = _proof(number, 4, 2)
    assert proof.difference < 1e-12 and not proof.partial


@pytest.mark.parametrize("tp, heads", [(2, 3), (3, 4), (4, 6)])
@pytest.mark.parametrize("number", range(6))
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_heads_that_do_not_divide_go_to_the_ranks_whole(number: int, tp: int, heads: int) -> None:
    _proof(number, heads, tp)


@pytest.mark.parametrize("number", range(4))
def test_equal_on_simulated_ranks_with_parameters_from_a_plan(number: int) -> None:
    torch.manual_seed(number)
    attention, inputs, options = _case(_options()[number], 4)
    check(attention, *inputs, **options)


def test_unbatched_inputs_and_masks() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(E, 4)
    query, key = torch.randn(5, E).double(), torch.randn(7, E).double()
    padding = torch.tensor([False] * 5 + [True] * 2)
    mask = torch.randn(4, 5, 7).double()
    check(attention, query, key, key, key_padding_mask=padding.double() * -9, attn_mask=mask)
    check(attention, query, key, key, key_padding_mask=padding, need_weights=False)


def test_more_ranks_than_heads_and_other_forwards_are_refused() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(PlanError, match="num_heads 2 is too small for 3 tp ranks"):
        resolve_plan(nn.ModuleDict({"a": nn.MultiheadAttention(12, 2)}), {"a": "attention"}, 3)
    with pytest.raises(PlanError, match="with its own forward, not Mine"):
        resolve_plan(nn.ModuleDict({"a": Mine(12, 2)}), {"a": "attention"}, 2)
    with pytest.raises(PlanError, match="SplitHeads is for"):
        resolve_plan(nn.ModuleDict({"a": nn.Linear(12, 12)}), {"a": "attention"}, 2)
    with pytest.raises(PlanError, match="reads weights without calling"):
        resolve_plan(
            nn.ModuleDict({"a": nn.MultiheadAttention(12, 2, kdim=3)}), {"a.out_proj": "rowwise"}, 2
        )


def _encoder(batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, 4, 32, dropout=0.0, batch_first=batch_first)
    return _perturbed(
        nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E), enable_nested_tensor=True)
    )


def _perturbed(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.data.add_(torch.randn(param.shape) * 0.05)
    return model


def _sample(number: int) -> torch.Tensor:
    return torch.randn(2, 5, E, generator=torch.Generator().manual_seed(number))


def _masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[0, -1] = True
    return model(x, src_key_padding_mask=padding).square().mean()


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2), (2, 1, 2)])
def test_transformer_encoder_derived_and_equal(layout: tuple[int, int, int]) -> None:
    options = {"steps": 2, "fp32": False, "tp_plan": "auto"}
    assert_parity(_encoder, _sample, MeshLayout(*layout), loss=_masked, **options)


def test_transformer_with_cross_attention_derived_and_equal() -> None:
    def build() -> nn.Module:
        return _perturbed(nn.Transformer(E, 4, 1, 1, 32, dropout=0.0, batch_first=True))

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _sample(number), _sample(number + 100)[:, :4]

    assert_parity(build, batch, MeshLayout(1, 1, 2), steps=2, fp32=False, tp_plan="auto")


def test_inference_does_not_take_the_way_that_reads_weights_directly() -> None:
    torch.manual_seed(0)
    plain = _encoder().double().eval()
    x = _sample(0).double()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, -1] = True
    split = copy.deepcopy(plain)
    with torch.no_grad():
        wanted = plain(x, src_key_padding_mask=padding)
    with local_world(2) as world, torch.no_grad():
        on_ranks(split, auto_plan(split, 2), world)
        got = split(world.map(lambda r: x.clone()), src_key_padding_mask=padding)
        for on_rank in world.per_rank(got):
            same(on_rank[:, :-1], wanted[:, :-1])  # torch's nested tensors put zeros where padded


def test_dropout_differs_on_heads_and_is_alike_on_whole_tensors() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(E, 4, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, weights = self.attn(x, x, x, average_attn_weights=False)
            return nn.functional.dropout(y, 0.5), weights

    torch.manual_seed(0)
    model, x = Dropping().double(), _sample(0).double()
    with local_world(2) as world:
        on_ranks(model, {"attn": "attention"}, world)
        y, weights = model(world.map(lambda r: x.clone()))
        same(*world.per_rank(y))
        same(*world.per_rank(weights))
        dropped = world.per_rank(weights)[0] == 0
    assert 0.3 < dropped.double().mean() < 0.7
    assert not torch.equal(dropped[:, :2], dropped[:, 2:])
