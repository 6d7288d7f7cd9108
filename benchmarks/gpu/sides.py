"""The same model under our engine and under torch's FSDP2, as one rank of many on one device."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from emulated_network import EmulatedNetwork, Link, VirtualClock
from llama import Llama, LlamaConfig, RotaryEmbedding
from models import local_gradients, local_parameters
from page import Part
from share import synchronize
from torch import nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d import fsdp as p3d_fsdp

__all__ = [
    "SIDES",
    "Batch",
    "check_finite",
    "fill",
    "loss_of",
    "make",
    "plain_shards",
    "rank_of_many",
    "release",
    "shard",
    "state_bytes",
]

SIDES = ("ours", "torch")
NAMES = {"plain": "plain", "ours": "ours", "torch": "FSDP2"}
Batch = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def rank_of_many(
    layout: p3d.MeshLayout,
    device: str,
    *,
    links: Mapping[str, Link] | None = None,
    axes: Mapping[str, str] | None = None,
    values: bool = True,
    clock: VirtualClock | None = None,
) -> Iterator[tuple[EmulatedNetwork, DeviceMesh]]:
    """This process is rank 0 of ``layout``, whose links take no time unless given."""
    release(device)  # what earlier parts have left
    links = links or {"link": Link()}
    with EmulatedNetwork(
        world_size=layout.world_size, links=links, axes=axes, values=values, clock=clock
    ) as network:
        mesh = p3d.build_mesh(layout, device_type=device)
        network.attach(mesh)
        yield network, mesh
        synchronize(device)
    release(device)


def release(device: str) -> None:
    """Returns memory that nothing uses to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def shard(
    model: Llama, side: str, mesh: DeviceMesh, *, mixed: bool = True, reshard: bool = True
) -> Llama:
    """``model`` in the units that ``parallelize`` makes, on both sides: embedding, blocks, norm with head."""
    kind: Any = p3d_fsdp if side == "ours" else fsdp
    policy = (
        kind.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else kind.MixedPrecisionPolicy()
    )
    if side != "ours":
        mesh = mesh["replicate", "shard"] if mesh.shape[0] > 1 else mesh["shard"]

    def apply(modules: Any, reshard: bool) -> None:
        kind.fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    for block in model.layers:
        apply(block, reshard)
    apply(model.tok_embeddings, reshard)
    apply([model.norm, model.output], False)
    apply(model, False)
    return model


def make(
    side: str,
    config: LlamaConfig,
    mesh: DeviceMesh,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    mixed: bool = True,
    reshard: bool = True,
) -> Llama:
    """A model of this rank's shards, without the memory of a whole one.

    Args:
        side: "ours", "torch", or "plain": a whole model in bf16, or in ``dtype`` unless ``mixed``.
        dtype: of the parameters at rest.
        mixed: bf16 computation and fp32 reduction.
        reshard: whether blocks are freed after forward.
    """
    with torch.device("meta"):
        model = Llama(config)
    model.to(torch.bfloat16 if side == "plain" and mixed else dtype)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.float()  # its tables, which mixed precision leaves in fp32
    if side != "plain":
        shard(model, side, mesh, mixed=mixed, reshard=reshard)
    model.to_empty(device=device)
    fill(model)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Gives this rank's shards values: norms ones, the others small random numbers."""
    torch.manual_seed(0)
    for local in local_parameters(model):
        if local.dim() == 1:
            local.fill_(1.0)
        else:
            local.normal_(std=0.02)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.fill_tables()


def batch_of(config: LlamaConfig, tokens: int, device: str, *, length: int = 512) -> Batch:
    """Ids and targets of ``tokens`` tokens, in sequences of at most ``length``."""
    length = min(length, tokens, config.max_seq_len)
    ids = torch.randint(config.vocab_size, (tokens // length, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy in fp32."""
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def forward_backward(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """Returns a step without an optimizer's."""

    def step() -> None:
        loss_of(model, batch).backward()
        model.zero_grad()

    return step


def check_finite(part: Part, what: str, loss: Callable[[], torch.Tensor]) -> None:
    """Runs a step whose collectives write values; a loss that isn't finite is a failure of the part."""
    value = loss()
    value.backward()
    if not math.isfinite(number := float(value.detach())):
        part.failed.append(f"{what}: the loss is {number}")


def plain_shards(model: nn.Module) -> list[nn.Parameter]:
    """This rank's shards as plain parameters with gradients of their own."""
    shards = []
    for local, grad in zip(local_parameters(model), local_gradients(model), strict=True):
        param = nn.Parameter(local.detach().clone())
        param.grad = torch.zeros_like(param) if grad is None else grad.clone().to(param.dtype)
        shards.append(param)
    return shards


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of this rank's parameters, as many of gradients, and the optimizer's state."""
    size = 2 * sum(local.nbytes for local in local_parameters(model))
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                size += value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes
    return size
