"""torchao's tensors and optimizers on our units: NF4 (QLoRA), float8 training, low-bit optimizers, int8.

What runs is torchao's own code, beside a plain model or torch's ``fully_shard``. The programs are those of
the rows in ``docs/integrations.md``.
"""

import copy
import dataclasses
import functools
import io
import math
from unittest import mock

import pytest

pytest.importorskip("torchao")

import torch
import torchao.prototype.quantized_training as quantized
from _support.integrations.torchao_rows import (
    both,
    converted,
    float8,
    low_bit,
    mesh_of,
    ours,
    quantized_training,
    sgd,
    stack,
)
from torch import nn
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_utils import tensor_to_scale
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from parallel3d import (
    CheckpointError,
    MeshLayout,
    Parallel3dError,
    PlanError,
    build_mesh,
    checkpoint,
    optim,
    parallelize,
)
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world
from parallel3d.tp import Colwise, Rowwise

pytestmark = pytest.mark.ci

DIM = 512  # what NF4 cuts into blocks of 64 x 256


class Lora(nn.Module):
    """A quantised weight, and a trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = to_nf4(torch.randn(DIM, DIM) / 20)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.lora = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(input=x, weight=self.weight) + self.lora(x)


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that an NF4 one consists of."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_nf4_shards_are_bit_for_bit_the_values_given(rank, ranks) -> None:
    given = parts(Lora().weight.data)
    with fake_world(rank, ranks):
        model = fully_shard(Lora(), mesh=mesh_of((1, ranks, 1)))
        for each in (model, copy.deepcopy(model)):
            for name, mine in parts(each.weight.to_local()).items():
                want = given[name]
                if name in ("quantized_data", "quantized_scalers", "quantization_factor"):
                    want = want.chunk(ranks)[rank]
                assert torch.equal(mine, want), name


@pytest.mark.parametrize("rank", range(3))
def test_nf4_that_can_not_be_cut_is_an_error_on_every_rank(rank) -> None:
    with fake_world(rank, 3):
        model = Lora()
        with pytest.raises(Parallel3dError, match=r"weight of unit Lora, a NF4Tensor .*3 shards"):
            fully_shard(model, mesh=mesh_of((1, 3, 1)))
        assert type(model) is Lora


def qlora() -> None:
    plain, model = Lora(), Lora()
    fully_shard(model)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        out = [each(x) for each in (plain, model)]
        assert torch.equal(out[0], out[1])
        for each in out:
            each.square().mean().backward()
        got = model.lora.weight.grad.full_tensor()
        torch.testing.assert_close(got, plain.lora.weight.grad)


def test_qlora_trains_as_the_plain_model(gloo_pool) -> None:
    gloo_pool.run(qlora, world_size=2)


def same_values(gloo_pool, sizes, features, gathers: bool, scales: bool) -> None:
    (result, *_) = gloo_pool.run(
        float8, sizes, features, gathers, scales, False, world_size=math.prod(sizes)
    )
    # Bit for bit on two ranks; on more the mean's rounding differs.
    assert result.ours.weights <= (0 if sizes[1] <= 2 else 1e-6) and result.ours.loss < 1e-6, result


@pytest.mark.slow
@pytest.mark.parametrize(("gathers", "scales"), [(False, False), (True, False), (True, True)])
def test_float8_training_is_the_plain_models(gloo_pool, gathers, scales) -> None:
    same_values(gloo_pool, (1, 2, 1), (32, 64, 32), gathers, scales)


@pytest.mark.parametrize("scales", [False, True])
def test_float8_on_uneven_shards(gloo_pool, scales) -> None:
    """torch's engine ends the process there: pytorch/ao 3983."""
    same_values(gloo_pool, (1, 2, 1), (32, 17, 9), True, scales)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("features", [(32, 18, 16), (32, 17, 9)])  # 9 rows: none on the last rank
def test_float8_on_four_uneven_shards(gloo_pool, features, scales) -> None:
    same_values(gloo_pool, (1, 4, 1), features, True, scales)


@pytest.mark.slow
def test_float8_shards_without_rows_are_copied_and_pickled() -> None:
    """torch refuses the largest absolute value of none: that rank raised, and the others waited for it."""
    with fake_world(3, 4):
        model = ours(converted(stack(32, 17, 9), gathers=True), mesh_of((1, 4, 1)))
        local = get_local_tensor(model[2].weight)
        assert local.shape == (0, 17)
        file = io.BytesIO()
        torch.save(local, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(loaded) is type(get_local_tensor(model[0].weight)) and loaded.shape == (0, 17)
        for each in (model, copy.deepcopy(model), model.double()):
            precompute_float8_dynamic_scale_for_fsdp(each)
            assert get_local_tensor(each[2].weight)._precomputed_scale is not None
            for order in (2, math.inf):
                norms = torch._foreach_norm([get_local_tensor(p) for p in each.parameters()], order)
                assert norms[2] == 0 and norms[0] > 0


def scales_of_the_whole(sizes, features) -> None:
    model = ours(converted(stack(*features), gathers=True), mesh_of(sizes))
    precompute_float8_dynamic_scale_for_fsdp(model)
    plain = [m for m in stack(*features) if isinstance(m, nn.Linear)]
    made = [m for m in model if isinstance(m, nn.Linear)]
    for linear, given in zip(made, plain, strict=True):
        scale = get_local_tensor(linear.weight)._precomputed_scale
        assert scale == tensor_to_scale(given.weight, torch.float8_e4m3fn)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_precomputed_scales_are_those_of_whole_weights(gloo_pool, sizes) -> None:
    gloo_pool.run(scales_of_the_whole, sizes, (32, 17, 18), world_size=math.prod(sizes))


def float8_under_tp(sizes, features, power: bool, limit: float) -> None:
    """By powers of two the ranks' sums are exact, and so are the weights, but for the data ranks' mean."""
    result = both(sizes, lambda: converted(stack(*features), power=power), sgd, peer=False)
    assert max(result.ours) <= limit, result


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("sizes", "features", "power", "limit"),
    [
        ((1, 1, 2), (32, 17, 32), True, 1e-6),
        pytest.param((1, 2, 2), (32, 64, 32), True, 5e-6, marks=slow),
        pytest.param((1, 1, 4), (32, 64, 32), True, 5e-6, marks=slow),
        pytest.param((1, 2, 2), (32, 64, 32), False, 5e-6, marks=slow),
    ],
)
def test_float8_under_tp(gloo_pool, sizes, features, power, limit) -> None:
    world_size = math.prod(sizes)
    gloo_pool.run(float8_under_tp, sizes, features, power, limit, world_size=world_size)


def scaled_by_rows(sizes, recipe: str) -> None:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    build = lambda: convert_to_float8_training(stack(32, 64, 32), config=config)  # noqa: E731
    result = both(sizes, build, sgd, peer=False)
    assert max(result.ours) <= 1e-6, result


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_of_rows_under_tp(gloo_pool, recipe) -> None:
    gloo_pool.run(scaled_by_rows, (1, 1, 2), recipe, world_size=2)


@pytest.mark.slow
def test_float8_gathers_under_tp_need_precomputed_scales(gloo_pool) -> None:
    """Each tp rank's part has a scale of its own without, as on torch's engine: other float8 numbers."""
    without, precomputed = (
        gloo_pool.run(float8, (1, 1, 2), (32, 64, 32), True, scales, False, world_size=2)[0]
        for scales in (False, True)
    )
    assert 1e-6 < without.ours.weights < 2e-2, without
    assert max(precomputed.ours) <= 1e-6, precomputed


def quantized_stack(config) -> nn.Sequential:
    model = stack(32, 64, 32)
    quantize_(model, config)
    return model


@pytest.mark.parametrize(
    ("build", "plan", "match"),
    [
        (
            lambda: converted(stack(32, 64, 32)),
            {"0": Colwise(input="sequence", chunks=2), "2": Rowwise(output="sequence")},
            "chunks is 2, but a Float8Linear",
        ),
        (
            lambda: quantized_stack(quantized.int8_weight_only_quantized_training()),
            {"0": "colwise", "2": "rowwise"},
            "Int8QuantizedTrainingLinearWeight.* can't be split over tp",
        ),
        (
            lambda: quantized_stack(quantized.int8_mixed_precision_training(module_swap=True)),
            {"0": "colwise", "2": "rowwise"},
            "not Int8MixedPrecisionTrainingLinear",
        ),
    ],
)
def test_what_tp_refuses(build, plan, match) -> None:
    with fake_world(0, 2), pytest.raises(PlanError, match=match):
        parallelize(build(), build_mesh(MeshLayout(1, 1, 2), device_type="cpu"), plan)


@pytest.mark.slow
def test_tp_refuses_a_head_under_loss_parallel_and_shared_keys() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        with pytest.raises(PlanError, match=r"keep it out of the conversion by module_filter_fn"):
            parallelize(converted(LlamaForCausalLM(config)), mesh, "auto")
        config.num_key_value_heads = 2
        model = convert_to_float8_training(
            LlamaForCausalLM(config), config=Float8LinearConfig(emulate=True)
        )
        with pytest.raises(PlanError, match=r"'lm_head', the model's output head, is torchao's"):
            parallelize(model, mesh, "auto", loss_parallel=True)


OPTIMIZERS = {AdamW8bit: 0.046, AdamW4bit: 0.27, AdamWFp8: 0.072}
"""How far the weights are from the plain ones where states are quantized in other blocks."""


@pytest.mark.slow
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_low_bit_optimizers_step_as_plain_where_shards_are_aligned(gloo_pool, cls) -> None:
    """Each shard has 4096 elements or more, and is of whole blocks: the plain states, bit for bit."""
    for result in gloo_pool.run(low_bit, (1, 2, 1), (64, 256, 64), cls, world_size=2):
        assert result.ours.weights == result.peers.weights == 0


@pytest.mark.slow
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_low_bit_optimizers_step_as_on_torchs_engine_elsewhere(gloo_pool, cls) -> None:
    """Shards of fewer than 4096 elements are not quantized: other weights than the plain ones, by nature, and
    on torch's engine alike."""
    for result in gloo_pool.run(low_bit, (1, 3, 1), (96, 128, 96), cls, world_size=3):
        assert result.ours.weights == pytest.approx(OPTIMIZERS[cls], rel=0.5), result
        assert result.ours.weights == pytest.approx(result.peers.weights, rel=0.01)


@pytest.mark.slow
def test_low_bit_optimizers_compile_their_step(gloo_pool) -> None:
    for result in gloo_pool.run(
        low_bit, (1, 2, 1), (64, 128), AdamW8bit, True, world_size=2, timeout=300
    ):
        assert result.ours.weights <= 1e-6, result


@pytest.mark.parametrize("said", [{"elementwise": True}, {"matrix": True}])
def test_subclasses_of_low_bit_optimizers_are_not_for_local(said) -> None:
    model = nn.Linear(64, 128)
    optimizer = optim.local(type("Derived", (AdamW8bit,), {}), model, **said)
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(Parallel3dError, match=r"keeps a OptimState8bit .* use the class itself"):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "mixed"])
def test_quantized_training_on_uneven_shards(gloo_pool, kind) -> None:
    for result in gloo_pool.run(
        quantized_training, (1, 2, 1), (32, 17, 32), kind, False, world_size=2
    ):
        assert result.ours.weights == 0 and result.ours.loss < 1e-6, result


def bitnet_on_uneven() -> None:
    with pytest.raises(
        Parallel3dError, match=r"BitNet\w+ of shape \(17, 32\) is cut unevenly|cut unevenly"
    ):
        quantized_training((1, 2, 1), (32, 17, 32), "bitnet", peer=False)


@pytest.mark.slow
def test_bitnet_weights_on_uneven_shards_are_refused(gloo_pool) -> None:
    gloo_pool.run(bitnet_on_uneven, world_size=2)


def float8_checkpoint(folder) -> None:
    def model() -> nn.Module:
        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
        made = convert_to_float8_training(stack(256, 256, 256, bias=False), config=config)
        return ours(made, mesh_of((1, 2, 1)))

    saved, fresh = model(), model()
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    precompute_float8_dynamic_scale_for_fsdp(saved)
    checkpoint.save(folder, saved, step=1)
    checkpoint.load(folder, fresh)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(fresh(x), saved(x)) and fresh(x).any()
    with pytest.raises(CheckpointError, match=r"0\.weight holds .*precomputed scale"):
        checkpoint.load(folder, saved)


def float8_resumed(folder) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = ours(converted(stack(32, 64, 32), gathers=True), mesh_of((1, 2, 1)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    checkpoint.save(folder, model, optimizer, step=1)
    resumed = made()
    checkpoint.load(folder, *resumed)
    step(model, optimizer)
    step(*resumed)
    for a, b in zip(resumed[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(a.to_local() - b.to_local(), torch.zeros(a.to_local().shape))


@pytest.mark.slow
def test_float8_training_resumes(gloo_pool, tmp_path) -> None:
    """The optimizer's state has the weights' shape, and not their class."""
    gloo_pool.run(float8_resumed, tmp_path / "step", world_size=2)


def test_float8_weights_in_a_checkpoint(gloo_pool, tmp_path) -> None:
    gloo_pool.run(float8_checkpoint, tmp_path, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_quantized_states_are_in_no_checkpoint(tmp_path, cls) -> None:
    """They have no memory of their own: the process ended where it was read."""
    with fake_world(0, 1), mock.patch.object(torch, "compile", lambda function, **_: function):
        model = fully_shard(stack(64, 64, 8, bias=False), mesh=mesh_of((1, 1, 1)))
        optimizer = cls(model.parameters(), lr=0.01)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        for save in (functools.partial(checkpoint.save, step=1), checkpoint.save_dcp):
            folder = tmp_path / "refused"
            with pytest.raises(
                CheckpointError, match=r"0\.weight.* is a OptimState.*get_state_dict"
            ):
                save(folder, model, optimizer)
            assert not (folder / ".metadata").exists() and not list(folder.glob("checkpoint*"))
        checkpoint.save(tmp_path / "model", model, step=1)


def test_nf4_weights_are_in_no_checkpoint_but_adapters_are(tmp_path) -> None:
    with fake_world(0, 1):
        model = fully_shard(Lora(), mesh=mesh_of((1, 1, 1)))
        with pytest.raises(CheckpointError, match=r"weight is a NF4Tensor, .*only=\"trainable\""):
            checkpoint.save(tmp_path / "whole", model, step=1)
        checkpoint.save(tmp_path / "lora", model, step=1, only="trainable")
        before = model.lora.weight.to_local().clone()
        with torch.no_grad():
            model.lora.weight.zero_()
        checkpoint.load(tmp_path / "lora", model)
        assert torch.equal(model.lora.weight.to_local(), before)
