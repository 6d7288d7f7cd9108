"""FLOPs are the planner's and the common formula's; GPUs are found by what torch calls them."""

import pytest
import torch
from llama import Llama, LlamaConfig
from torch import nn

from parallel3d.mesh import MeshLayout
from parallel3d.observability import model_flops
from parallel3d.observability.flops import peak_by_name
from parallel3d.planner import Cluster, Workload, gpus, predict, spec_from_hf_config


def test_a_linear_by_hand() -> None:
    spec_of = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 10))
    found = model_flops(spec_of, 4)
    assert found.per_token == 6 * (8 * 16 + 16 * 10)
    assert found.per_token_6n == 6 * sum(p.numel() for p in spec_of.parameters())


def test_llama_by_hand() -> None:
    config = LlamaConfig.named("small")
    with torch.device("meta"):
        model = Llama(config)
    s = config.max_seq_len
    kv = config.dim * config.n_kv_heads // config.n_heads
    block = 2 * config.dim**2 + 2 * config.dim * kv + 3 * config.dim * config.hidden_dim
    matmuls = config.n_layers * block + config.dim * config.vocab_size
    scores = config.n_layers * config.dim * s
    found = model_flops(model, s)
    assert found.per_token == 6 * matmuls + 3.5 * 2 * scores
    n = sum(p.numel() for p in model.parameters())
    assert found.per_token_6n == 6 * n + 12 * scores


def test_as_the_planner_counts() -> None:
    spec = spec_from_hf_config("llama-3.1-8b")
    cluster = Cluster.of("h100", nodes=1)
    work = Workload(seq_len=8192, micro_batch=1)
    predicted = predict(spec, MeshLayout(1, 8, 1), cluster, work)
    found = model_flops(spec, 8192)
    rate = predicted.tokens_per_second_per_gpu / (cluster.gpu.peak * 1e12)
    assert found.per_token * rate == pytest.approx(predicted.mfu)
    assert found.per_token_6n * rate == pytest.approx(predicted.mfu_6n)


NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",  # not a B300's
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA L40S": "l40s",
    "NVIDIA H20": "h20",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize("name", NAMES)
def test_known_gpus(name: str) -> None:
    assert peak_by_name(name) == gpus()[NAMES[name]].peak * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA L40",
        "NVIDIA H200 NVL",
        "NVIDIA GB400",  # not a GB300's
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a part of one
    ],
)
def test_others(name: str) -> None:
    assert peak_by_name(name) is None
