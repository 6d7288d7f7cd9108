"""torchao's programs: float8 training, low-bit optimizers, quantized weights.

The plain process computes the loss of each data rank's batch by itself and adds their gradients, since
torchao scales the activations of each rank by themselves.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
import torchao.prototype.quantized_training as quantized
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import quantize_

import parallel3d as p3d

from .rows import STEPS, Result, Row, Run, difference

Build = Callable[[], nn.Module]
Batch = Callable[[int, int], Any]  # of a step and a data rank


def stack(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers of these numbers of features, with a ReLU after each."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for features, out in itertools.pairwise(sizes):
        layers += nn.Linear(features, out, bias=bias), nn.ReLU()
    return nn.Sequential(*layers[:-1])


def numbers(features: int) -> Batch:
    """Batches of numbers for ``stack``."""

    def batch(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(16, features, generator=generator)

    return batch


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of ``stack``."""
    return model(x).square().mean()


def plain_run(
    model: nn.Module, optimizer: Any, batch: Batch, ranks: int, loss: Callable[..., Any] = square
) -> Run:
    """The training of one process on the batches of all data ranks."""
    losses = []
    for step in range(STEPS):
        parts = [loss(model, batch(step, rank)) / ranks for rank in range(ranks)]
        for part in parts:
            part.backward()
        losses.append(sum(float(part.detach()) for part in parts))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, {name: values(p.detach()) for name, p in model.named_parameters()})


def run_on(
    model: nn.Module,
    optimizer: Any,
    batch: Batch,
    rank: int,
    loss: Callable[..., Any] = square,
    after: Callable[[nn.Module], Any] = lambda model: None,
) -> Run:
    """The training of this process, whose data rank is ``rank``; ``after`` runs before and after steps."""
    losses = []
    after(model)
    for step in range(STEPS):
        own = loss(model, batch(step, rank))
        own.backward()
        total = own.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    return Run(losses, {name: whole(p.detach()) for name, p in model.named_parameters()})


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of one of torchao's weights, or of an ordinary tensor."""
    inner = {"WeightWithDynamicFloat8CastTensor": "_tensor", "BitNetTrainingLinearWeight": "_data"}
    if type(tensor).__name__ == "Int8QuantizedTrainingLinearWeight":
        tensor = tensor.dequantize()
    tensor = getattr(tensor, inner.get(type(tensor).__name__, ""), tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def whole(tensor: Any) -> torch.Tensor:
    """The same of a DTensor, gathered."""
    shape, mesh = {"shape": tensor.shape, "stride": tensor.stride()}, tensor.device_mesh
    local = values(tensor.to_local())
    made = DTensor.from_local(local, mesh, tensor.placements, run_check=False, **shape)
    return made.full_tensor()


def mesh_of(sizes: Sequence[int]) -> DeviceMesh:
    return p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")


def data_rank(mesh: DeviceMesh) -> int:
    return mesh["shard"].size() * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")


def theirs(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """The model on torch's ``parallelize_module`` and ``fully_shard``."""
    linears = {name: each for name, each in model.named_children() if isinstance(each, nn.Linear)}
    if mesh["tp"].size() > 1:
        styles = [ColwiseParallel(), RowwiseParallel()] * len(linears)
        parallelize_module(model, mesh["tp"], dict(zip(linears, styles, strict=False)))
    if mesh["shard"].size() > 1:
        for linear in linears.values():
            torch_fully_shard(linear, mesh=mesh["shard"])
        torch_fully_shard(model, mesh=mesh["shard"])
    return model


def ours(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """The model through ``parallelize``."""
    linears = [name for name, each in model.named_children() if isinstance(each, nn.Linear)]
    plan = dict(zip(linears, ["colwise", "rowwise"] * len(linears), strict=False))
    return p3d.parallelize(
        model, mesh, tp_plan=plan if mesh["tp"].size() > 1 else None, units=linears
    )


def both(
    sizes: Sequence[int],
    build: Build,
    optimizer: Callable[[Iterable[Any]], Any],
    peer: bool = True,
    after: Callable[[nn.Module], Any] = lambda model: None,
) -> Result:
    """Ours and the peer's run of a stack, each beside the plain one."""
    mesh = mesh_of(sizes)
    model = build()
    batch = numbers(model[0].in_features)  # type: ignore[index]
    plain = plain_run(model, optimizer(model.parameters()), batch, sizes[0] * sizes[1])
    found = []
    for shard in (ours, theirs) if peer else (ours,):
        model = shard(build(), mesh)
        run = run_on(model, optimizer(model.parameters()), batch, data_rank(mesh), after=after)
        found.append(difference(run, plain))
    return Result(found[0], found[1] if peer else None)


def sgd(params: Iterable[Any]) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def converted(model: nn.Module, *, gathers: bool = False, power: bool = False) -> nn.Module:
    """``model`` with Float8Linear in place of its linears but ``lm_head``, emulated on the CPU."""
    config = Float8LinearConfig(
        emulate=True, enable_fsdp_float8_all_gather=gathers, round_scales_to_power_of_2=power
    )
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )


def float8(
    sizes: Sequence[int], features: Sequence[int], gathers: bool, scales: bool, peer: bool
) -> Result:
    """Float8 training with weights gathered in float8, and their scales computed after each step."""

    def after(model: nn.Module) -> None:
        if scales:
            precompute_float8_dynamic_scale_for_fsdp(model)

    def build() -> nn.Module:
        return converted(stack(*features), gathers=gathers)

    return both(sizes, build, sgd, peer, after)


def float8_llama(sizes: Sequence[int]) -> Result:
    """A Llama of Hugging Face in float8, by its own plan, weights gathered in float8; the peer has no tp."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(*, gathers: bool) -> nn.Module:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return converted(LlamaForCausalLM(config), gathers=gathers)

    def batch(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randint(0, 64, (2, 8), generator=generator)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    mesh, model = mesh_of(sizes), build(gathers=False)
    plain = plain_run(model, sgd(model.parameters()), batch, sizes[0] * sizes[1], loss)
    peers: Any = build(gathers=True)
    for each in (*peers.model.layers, peers):
        torch_fully_shard(each, mesh=mesh["shard"])
    after, rank = precompute_float8_dynamic_scale_for_fsdp, data_rank(mesh)
    runs = [
        run_on(model, sgd(model.parameters()), batch, rank, loss, after)
        for model in (p3d.parallelize(build(gathers=True), mesh, tp_plan="auto"), peers)
    ]
    return Result(*(difference(run, plain) for run in runs))


def low_bit(
    sizes: Sequence[int], features: Sequence[int], cls: Any, compiled: bool = False
) -> Result:
    """torchao's optimizers, whose states are quantized in blocks of 128 or 256 elements.

    They compile each step, which takes minutes: here it runs as it is, or as it was traced (``compiled``).
    """

    def compile_(function: Any, **options: Any) -> Any:
        return traced(function, **{**options, "backend": "aot_eager"}) if compiled else function

    traced = torch.compile
    with mock.patch.object(torch, "compile", compile_):
        return both(sizes, lambda: stack(*features), lambda params: cls(params, lr=0.01))


def quantized_training(
    sizes: Sequence[int], features: Sequence[int], kind: str, peer: bool = True
) -> Result:
    """Weights held, or multiplied, in int8 or in 1.58 bits. Random rounding of weights becomes ordinary."""
    configs = {
        "int8": quantized.int8_weight_only_quantized_training,
        "mixed": lambda: quantized.int8_mixed_precision_training(module_swap=True),
        "bitnet": quantized.bitnet_training,
    }

    def build() -> nn.Module:
        model = stack(*features)
        quantize_(model, configs[kind]())
        return model

    with mock.patch.object(torch, "rand_like", lambda t, **_: torch.full_like(t, 0.5)):
        return both(sizes, build, sgd, peer)


_SIZES = (32, 64, 32)
_ALIGNED = (64, 256, 64)  # shards of 4096 elements or more, and of whole blocks


def _row(name: str, run: Any, mesh: tuple[int, int, int], *arguments: Any, **more: Any) -> Row:
    more = {"packages": ("torchao",), "lines": 0, "peer": "FSDP2", "dtype": "float32", **more}
    return Row(name=f"torchao: {name}", mesh=mesh, run=run, arguments=(mesh, *arguments), **more)


_MESH = (1, 2, 1)
_ENDS = "FSDP2 ends the process (pytorch/ao 3983)"
_ROUNDED, _SWAPPED = (
    "weights are rounded to the nearest in all three runs",
    "with `module_swap=True`",
)
_TP = {"lines": 1, "peer": "parallelize_module"}
_LLAMA = {"packages": ("torchao", "transformers"), "lines": 1, "peer": "FSDP2 without tp"}
ROWS = [
    _row("float8 gathers", float8, _MESH, _SIZES, True, False, True),
    _row("float8 gathers, scales computed before", float8, _MESH, _SIZES, True, True, True),
    _row("float8 gathers, uneven", float8, (1, 4, 1), (32, 17, 9), True, False, False, note=_ENDS),
    _row("float8 under tp", float8, (1, 1, 2), _SIZES, False, False, True, **_TP),
    _row("float8 Llama, gathers, scales computed before", float8_llama, (1, 2, 2), **_LLAMA),
    *(
        _row(f"{cls.__name__}, aligned shards", low_bit, _MESH, _ALIGNED, cls)
        for cls in (AdamW8bit, AdamW4bit, AdamWFp8)
    ),
    _row("int8 weights", quantized_training, _MESH, _SIZES, "int8", note=_ROUNDED),
    _row("int8 matmuls", quantized_training, _MESH, _SIZES, "mixed", note=_SWAPPED),
    _row("BitNet", quantized_training, _MESH, _SIZES, "bitnet"),
]
