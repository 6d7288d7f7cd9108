"""A training step of a mixture on 4 gloo processes: ours with ep, ours without, and transformers' own ep.

    python benchmarks/ep_step.py [--quick] [--json PATH]

A Qwen3-MoE of 4 layers 256, 32 experts of which a token takes 4, 4 x 128 tokens on each rank, AdamW. All read
the same weights and the same batches, and take turns in one launch. "ep": ``MeshLayout(shard=4, ep=4)``;
"shard": ``MeshLayout(shard=4)``, whose experts are gathered; "transformers": ``DistributedConfig(fsdp_size=4,
ep_size=4)``, on torch's FSDP2. A step takes as long as its slowest rank. The bytes are those that a rank
sends and receives in a step's collectives, as recorded.
"""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import MIB, Claim, Rounds, alternate, command_line, print_table, range_of
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d.testing import GlooPool, record_collectives

RANKS = 4
TOKENS = (4, 128)
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
}
BAR = 1.0


def step_of(model: nn.Module) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, SIZES["vocab_size"], TOKENS, generator=generator)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        optimizer.zero_grad()
        return seconds

    return step


def worker(folder: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """One rank: variant -> its steps, and MiB of its collectives in a step."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    warnings.filterwarnings("ignore")

    def ours(**sizes: int) -> nn.Module:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=RANKS, **sizes), device_type="cpu")
        model = AutoModelForCausalLM.from_pretrained(folder)
        return p3d.parallelize(model, mesh, checks=p3d.Checks(audit=False))

    config = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
    models = {
        "ep": ours(ep=RANKS),
        "shard": ours(),
        "transformers": AutoModelForCausalLM.from_pretrained(folder, distributed_config=config),
    }
    steps = {name: step_of(model.train()) for name, model in models.items()}
    timed = alternate(steps, rounds=rounds, steps_per_round=2, warmup=2)
    sent = {}
    for name in ("ep", "shard"):
        with record_collectives() as recorded:
            steps[name]()
        sent[name] = sum(call.bytes for call in recorded.calls) / MIB
    return timed.seconds, sent


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """The three, side by side."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers, rounds = (2, 4) if quick else (4, 10)
    with tempfile.TemporaryDirectory() as folder, GlooPool(RANKS) as pool:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **SIZES)).save_pretrained(
            folder
        )
        ranks = pool.run(worker, folder, rounds, timeout=900)
    whole = Rounds(
        {
            name: [max(each) for each in zip(*(seconds[name] for seconds, _ in ranks), strict=True)]
            for name in ranks[0][0]
        }
    )
    rows = [
        [name, whole.median(name) * 1e3, ranks[0][1].get(name, ""), *_against(whole, name)]
        for name in whole.seconds
    ]
    print_table("a step", ["", "ms", "MiB of collectives", "ep / this", "middle half"], rows)
    claims = [
        Claim(
            f"step of a mixture with ep on {RANKS} gloo processes, against {peer}",
            ours=whole.median("ep") * 1e3,
            peer=whole.median(peer) * 1e3,
            unit="ms",
            against=peer,
            bar=BAR,
            ratio=statistics.median(whole.ratios("ep", peer)),
            spread=range_of(whole.ratios("ep", peer)),
        )
        for peer in ("shard", "transformers")
    ]
    return claims, {"layers": layers, "seconds": whole.seconds, "mib": ranks[0][1]}


def _against(whole: Rounds, name: str) -> tuple[object, str]:
    ratios = whole.ratios("ep", name)
    return ("", "") if name == "ep" else (statistics.median(ratios), range_of(ratios))


if __name__ == "__main__":
    command_line(__doc__, run)
