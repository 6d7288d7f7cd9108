"""Rows of the peft library: LoRA of six families, and QLoRA, beside plain peft and peft on FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from _support.hf.all_double import AllDouble
from _support.integrations.rows import STEPS, Result, Row, Run, difference, whole
from parallel3d import MeshLayout, build_mesh, parallelize

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 43,
    "pad_token_id": 0,
}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 8}
NONE = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# family -> its class, fields of its config, the layers with adapters
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("AutoModelForCausalLM", {**SIZES, "num_key_value_heads": 2}, ALL),
    "qwen3": ("AutoModelForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 4}, ALL),
    "gemma": ("AutoModelForCausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 4}, ALL),
    "gpt2": (
        "AutoModelForCausalLM",
        {"vocab_size": 43, **GPT2, **NONE},
        ["c_attn", "c_proj", "c_fc"],
    ),
    "bert": ("AutoModelForMaskedLM", {**SIZES, **BERT}, ["query", "key", "value", "dense"]),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 43, "decoder_start_token_id": 0, **T5},
        ["q", "k", "v", "o", "wi", "wo"],
    ),
}


def base(family: str = "llama", **fields: Any) -> nn.Module:
    """Returns a plain model of transformers."""
    import transformers

    kind, sizes, _ = FAMILIES[family]
    config = transformers.CONFIG_MAPPING[family](**{**sizes, **fields})
    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(config, attn_implementation="eager")


def adapted(family: str = "llama", model: nn.Module | None = None, **lora: Any) -> nn.Module:
    """Returns a model with LoRA adapters that are not zero, of which each has a gradient."""
    from peft import LoraConfig, get_peft_model

    targets = lora.pop("target_modules", FAMILIES[family][2])
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets, **lora)
    if family == "gpt2":
        config.fan_in_fan_out = True
    model = get_peft_model(base(family) if model is None else model, config)
    fill(model)
    return model


def fill(model: nn.Module, seed: int = 1) -> None:
    """Gives all adapters of a plain model values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)


def batch(step: int) -> Tensor:
    """Returns the token ids (4, 6) of all ranks."""
    return torch.randint(1, 43, (4, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Returns the loss in the logits' dtype, of which transformers computes it in float32."""
    logits = model(input_ids=ids, labels=ids).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def double(family: str) -> Any:
    """Returns a context in which transformers' models compute in float64 throughout."""
    return nullcontext() if family == "gpt2" else AllDouble()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def train(model: nn.Module, rows: slice = slice(None), parts: int = 1) -> Run:
    """Trains the adapters by SGD on ``rows`` of each batch, one of the ``parts`` of the data ranks."""
    params = trained(model)
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step)[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    mean = torch.stack(losses)
    if parts > 1:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return Run(mean.tolist(), {name: whole(param) for name, param in params.items()})


def of_this_rank(layout: MeshLayout) -> tuple[slice, int]:
    """Returns the rows of a batch that this rank has, and how many parts there are."""
    rows = 4 // layout.data_size
    first = layout.data_rank(dist.get_rank()) * rows
    return slice(first, first + rows), layout.data_size


def ours(model: nn.Module, mesh: tuple[int, int, int]) -> tuple[nn.Module, slice, int]:
    layout = MeshLayout(*mesh)
    parallelize(model, build_mesh(layout, device_type="cpu"), "auto" if layout.tp > 1 else None)
    return model, *of_this_rank(layout)


def on_fsdp2(model: nn.Module) -> tuple[nn.Module, slice, int]:
    """As a user of FSDP2 shards it: each block, then the model; all ranks are data ranks."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    for module in reversed(list(model.modules())):  # inner blocks first
        if isinstance(module, nn.ModuleList):
            for block in module:
                torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model, *of_this_rank(MeshLayout(shard=size))


def lora(family: str, mesh: tuple[int, int, int]) -> Result:
    plain = adapted(family).double(), slice(None), 1
    # A plan is derived outside ``double``, on simulated ranks.
    mine = ours(adapted(family).double(), mesh)
    theirs = on_fsdp2(adapted(family).double())
    with double(family):
        runs = [train(*each) for each in (plain, mine, theirs)]
    return Result(difference(runs[1], runs[0]), difference(runs[2], runs[0]))


def nf4(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a Llama whose linear layers, but for the head, are torchao's NF4, with adapters."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model = base(hidden_size=64, intermediate_size=64).to(dtype)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            # Blocks of 32, so that a layer this small has enough of them to be cut.
            weight = to_nf4(module.weight.detach(), 32, 32)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return trained_in(dtype, adapted(model=model))


def bnb4(dtype: torch.dtype = torch.float64, storage: torch.dtype = torch.uint8) -> nn.Module:
    """The same with bitsandbytes' Linear4bit."""
    from bitsandbytes.nn import Linear4bit

    model = base(hidden_size=64, intermediate_size=64).to(dtype)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            sizes = module.in_features, module.out_features
            quantised = Linear4bit(*sizes, False, dtype, quant_type="nf4", quant_storage=storage)
            quantised.load_state_dict({"weight": module.weight})
            model.set_submodule(name, quantised.to("cpu"))
    return trained_in(dtype, adapted(model=model))


def trained_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """Gives adapters ``dtype``: ``model.double()`` would unpack what is quantised."""
    for param in trained(model).values():
        param.data = param.data.to(dtype)
    return model


def qlora(build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype) -> Result:
    plain = build(dtype), slice(None), 1
    mine, theirs = ours(build(dtype), (1, 2, 1)), on_fsdp2(build(dtype))
    with double("llama") if dtype is torch.float64 else nullcontext():
        runs = [train(*each) for each in (plain, mine, theirs)]
    return Result(difference(runs[1], runs[0]), difference(runs[2], runs[0]))


MESHES = ((1, 2, 2), (2, 1, 2))
PACKAGES = ("peft", "transformers")
ROWS = [
    Row(f"PEFT: LoRA of {family}", PACKAGES, 2, mesh, "FSDP2 on (1, 4, 1)", lora, (family, mesh))
    for family in ("llama", "qwen3", "gemma", "gpt2", "bert", "t5")
    for mesh in MESHES
]
_qlora = partial(Row, lines=1, mesh=(1, 2, 1), peer="FSDP2", run=qlora)
ROWS += [
    _qlora("PEFT: QLoRA, NF4 of torchao", ("peft", "torchao"), arguments=(nf4, torch.float64)),
    _qlora(
        "PEFT: QLoRA, Linear4bit of bitsandbytes",
        ("peft", "bitsandbytes"),
        arguments=(bnb4, torch.float32),
        dtype="float32",
    ),
]
