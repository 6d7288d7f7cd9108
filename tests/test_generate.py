"""Hugging Face's ``generate()`` on a sharded model gives the plain model's tokens."""

import copy

import pytest
import torch
from _support.engines import Engine
from _support.hf.uneven import uneven_lm
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.testing import record_collectives


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "bos_token_id": 1, "eos_token_id": 2}
    return uneven_lm(vocab_size=61, **sizes).double()


def prompt() -> torch.Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(3, 61, (1, 4), generator=generator)


def tokens_of(model: nn.Module, **options) -> list[int]:
    torch.manual_seed(5)
    return model.generate(prompt(), **options).flatten().tolist()


def same_tokens(model: nn.Module, plain: nn.Module) -> None:
    """Greedily and by sampling; also where rank 0 is done sooner but must run on for the other."""
    greedy = {"max_new_tokens": 5, "do_sample": False}
    end = tokens_of(plain, **greedy)[5] if dist.get_rank() == 0 else 2
    assert len(tokens_of(plain, **greedy, eos_token_id=end)) == (6 if dist.get_rank() == 0 else 9)
    for options in (
        greedy,
        {**greedy, "eos_token_id": end},
        {"max_new_tokens": 5, "do_sample": True, "top_k": 20},
    ):
        expected = tokens_of(plain, **options)
        assert tokens_of(model, **options) == expected
        with torch.inference_mode():
            assert tokens_of(model, **options) == expected


def train_step(model: nn.Module, samples: list[torch.Tensor]) -> None:
    model.train()
    for ids in samples:
        (model(input_ids=ids, labels=ids).loss / len(samples)).backward()
    for p in model.parameters():
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.5)
        p.grad = None
    model.eval()


def generate(engine: Engine) -> None:
    plain = tiny_llama().eval()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for layer in model.model.layers:
        engine.fully_shard(layer, mesh=mesh)
    engine.fully_shard(model, mesh=mesh)
    same_tokens(model, plain)
    generator = torch.Generator().manual_seed(9)
    samples = list(torch.randint(3, 61, (2, 2, 6), generator=generator))
    train_step(model, [samples[dist.get_rank()]])
    train_step(plain, samples)
    same_tokens(model, plain)
    # Gathered for the whole of it: no step gathers again.
    units = [m for m in model.modules() if isinstance(m, engine.FSDPModule)]
    if engine.ours:
        for unit in units:
            unit.set_reshard_after_forward(False)
            unit.unshard()
        with record_collectives(mesh) as recorder:
            same_tokens(model, plain)
        assert recorder.count("all_gather") == 0
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True)
    # As the unit's own forward: the root's parameters are gathered once, not once a token.
    engine.register_fsdp_forward_method(model, "generate")
    same_tokens(model, plain)
    train_step(model, [samples[dist.get_rank()]])
    train_step(plain, samples)
    same_tokens(model, plain)


@pytest.mark.parity("behaviour: Hugging Face generate()")
@pytest.mark.parity("behaviour: inference mode and no_grad")
@pytest.mark.parity("function: register_fsdp_forward_method")
def test_generate(on_ranks) -> None:
    pytest.importorskip("transformers")
    on_ranks(generate)
