"""torchtitan's Llama 3 and Qwen3 with experts, in float64, trained as its trainer does it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_backend, set_spmd_backend
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from _support.hf.all_double import AllDouble

VOCAB, DIM, BATCH, LENGTH, STEPS = 32, 24, 4, 8, 10
HEADS = {"n_layers": 2, "dim": DIM, "n_heads": 4, "n_kv_heads": 2}


class Double(AllDouble):
    """Its experts compute in bfloat16 whatever their dtype; here in float64 too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.bfloat16:
            func = Tensor.float
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def titan() -> Iterator[None]:
    """Its DTensor backend (the default one runs on accelerators alone) and float64, until the end."""
    backend = get_spmd_backend()
    default = torch.get_default_dtype()
    try:
        set_spmd_backend("partial_dtensor")
        torch.set_default_dtype(torch.float64)
        cpu = mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu")
        with cpu, Double(), mock.patch.dict(TORCH_DTYPE_MAP, {"float64": torch.float64}):
            yield
    finally:
        torch.set_default_dtype(default)
        set_spmd_backend(backend)


def llama_config(sequence: bool, tied: bool = False) -> Any:
    rope = ComplexRoPE.Config(dim=DIM // 4, max_seq_len=LENGTH, theta=10000.0)
    layers = llama3._build_llama3_layers(**HEADS, hidden_dim=40, rope=rope, attn_backend="flex")
    config = _config(llama3, llama3.Llama3Model, layers, tied)
    set_llama3_sharding_config(config, enable_sp=sequence)
    return config


def qwen_config(sequence: bool, tied: bool = False, ep: bool = False, experts: bool = True) -> Any:
    rope = CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=10000.0)
    common = {**HEADS, "head_dim": 8, "attn_backend": "flex", "rope": rope}
    if experts:
        layers = qwen3._build_qwen3_moe_layers(
            **common, moe_hidden_dim=24, num_experts=4, top_k=2, moe_comm_backend="standard"
        )
    else:  # with projections of their own
        layers = qwen3._build_qwen3_layers(**common, hidden_dim=40, fuse_qkv=False)
    config = _config(qwen3, qwen3.Qwen3Model, layers, tied)
    set_qwen3_sharding_config(config, enable_sp=sequence, enable_ep=ep)
    return config


def _config(family: Any, model: Any, layers: list[Any], tied: bool) -> Any:
    for layer in layers:  # the others need an accelerator
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    std = {"weight": lambda p: nn.init.normal_(p, std=0.3)}
    return model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB,
            embedding_dim=DIM,
            param_init=family._EMBEDDING_SKIP_INIT if tied else std,
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=family._NORM_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=std),
        layers=layers,
    )


CONFIGS: dict[str, Callable[..., Any]] = {
    "llama3": llama_config,
    "qwen3": functools.partial(qwen_config, experts=False),
    "qwen3_moe": qwen_config,
}


def build(family: str, sequence: bool = True, **options: Any) -> Any:
    """The model, plain, with the same weights on every rank."""
    torch.manual_seed(1)
    model = CONFIGS[family](sequence, **options).build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def by_titan(family: str, sizes: tuple[int, int, int], sequence: bool) -> Any:
    """The model as torchtitan's own function makes it parallel."""
    model = build(family, sequence)
    backend = get_spmd_backend()
    replicate, shard, tp = sizes
    dims = ParallelDims(replicate, shard, 1, tp, 1, 1, dist.get_world_size(), spmd_backend=backend)
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tp,
        spmd_backend=backend,
    )
    training = TrainingConfig()
    training.mixed_precision_param = training.mixed_precision_reduce = "float64"  # type: ignore[assignment]
    function = llama3.parallelize_llama if family == "llama3" else qwen3.parallelize_qwen3
    function(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has not the sum that it multiplies before
            module.set_force_sum_reduction_for_comms(True)
    return model


def loss_function(chunked: bool) -> BaseLoss:
    config = CrossEntropyLoss.Config()
    if chunked:
        config = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=config)
    return config.build()


def optimizers(model: nn.Module) -> tuple[Any, Any]:
    """Its containers, of AdamW and of a schedule."""
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    config = OptimizersContainer.Config(param_groups=[group], implementation="foreach")
    container = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=3)
    return container, schedule.build(optimizers=container, training_steps=2 * STEPS)


class Training:
    """The loop of torchtitan's trainer over a parallel or a plain model; ``rank``, ``size``: of the data."""

    def __init__(self, model: Any, rank: int, size: int, chunked: bool = False) -> None:
        self.model, self.rank, self.size = model, rank, size
        disable_fsdp_gradient_division(model)
        self.loss = loss_function(chunked)
        if chunked:
            self.loss.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        self.optimizers, self.schedulers = optimizers(model)

    def step(self, number: int) -> float:
        """One step; the loss over the whole batch."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        mine = ids.chunk(self.size)[self.rank]
        self.optimizers.zero_grad()
        tokens = torch.tensor(float(BATCH * LENGTH))
        output = self.model(mine[:, :-1])
        loss, _ = self.loss(output, mine[:, 1:], global_valid_tokens=tokens)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
        self.optimizers.step()
        self.schedulers.step()
        whole = loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()
        self.last = whole.clone()
        return float(self.last)

    def steps(self, count: int = STEPS, first: int = 0) -> list[float]:
        return [self.step(number) for number in range(first, first + count)]
