"""accelerate's FSDP2 path on this engine: what docs/integrations.md has no row for."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
import torch
from _support.integrations.accelerate_rows import fsdp2
from _support.integrations.hf import accelerate_state, loss_in_float64, tiny_model, tiny_rows
from _support.integrations.rows import whole_weights
from torch import distributed as dist
from torch.distributed import fsdp as torch_fsdp
from torch.utils.data import DataLoader

import parallel3d as p3d
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow


def test_use_is_undone() -> None:
    """A call takes effect at once; the end of a block, or undo, puts back what was there."""
    before = torch_fsdp.fully_shard
    use = p3d.integrations.accelerate.use
    first = use()
    assert torch_fsdp.fully_shard is p3d.fully_shard
    with use():
        assert torch_fsdp.fully_shard is p3d.fully_shard
    assert torch_fsdp.fully_shard is p3d.fully_shard
    first.undo()
    first.undo()
    assert torch_fsdp.fully_shard is before
    first, second = use(), use()  # and undone in the order of the calls
    first.undo()
    assert torch_fsdp.fully_shard is p3d.fully_shard
    second.undo()
    assert torch_fsdp.fully_shard is before
    with pytest.raises(KeyError), use():
        raise KeyError
    assert torch_fsdp.fully_shard is before


def prepared(optimizer: type = torch.optim.AdamW, *, replicate: int = 1, **options: Any) -> Any:
    """(accelerator, model, optimizer, loader) on this engine or torch's, as accelerate's users have them."""
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    plugin = options.pop("plugin", {})
    model = options.pop("model", None) or tiny_model(dtype=torch.float32, attention_dropout=0.1)
    ranks = dist.get_world_size()
    if replicate > 1:
        sizes = {"dp_replicate_size": replicate, "dp_shard_size": ranks // replicate}
        options["parallelism_config"] = ParallelismConfig(**sizes)
    accelerator = Accelerator(fsdp_plugin=fsdp2(**plugin), **options)
    loader = DataLoader(tiny_rows(80), batch_size=8 // ranks)
    own = optimizer(model.parameters(), lr=0.01)
    return (accelerator, *accelerator.prepare(model, own, loader))


def steps(accelerator: Any, model: Any, optimizer: Any, batches: list) -> list[float]:
    losses = []
    model.train()
    for batch in batches:
        loss = loss_in_float64(model(input_ids=batch["input_ids"]), batch["labels"])
        accelerator.backward(loss)
        losses.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def resumed(folder: Path, replicate: int, state_dict_type: str) -> None:
    plugin = {"state_dict_type": state_dict_type}
    with accelerate_state(fsdp=True), p3d.integrations.accelerate.use():
        accelerator, model, optimizer, loader = prepared(replicate=replicate, plugin=plugin)
        batches = list(loader)
        steps(accelerator, model, optimizer, batches[:4])
        accelerator.save_state(folder / "state")
        want = steps(accelerator, model, optimizer, batches[4:])
        weights = whole_weights(model)

        whole = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert {name: list(t.shape) for name, t in whole.items()} == {
                name: list(t.shape) for name, t in tiny_model().state_dict().items()
            }
            assert all(torch.equal(whole[name], value) for name, value in weights.items())
        accelerator.save_model(model, folder / "model")
        dist.barrier()
        if accelerator.is_main_process:
            from safetensors.torch import load_file

            stored = load_file(folder / "model" / "model.safetensors")
            assert all(torch.equal(stored[name], value) for name, value in weights.items())
    with accelerate_state(fsdp=True), p3d.integrations.accelerate.use():
        torch.manual_seed(1)
        accelerator, model, optimizer, _ = prepared(replicate=replicate, plugin=plugin)
        steps(accelerator, model, optimizer, batches[:1])
        accelerator.load_state(folder / "state")
        assert steps(accelerator, model, optimizer, batches[4:]) == want
        for name, value in whole_weights(model).items():
            assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("replicate", [1, 2])
def test_state_is_saved_and_resumed_exactly(
    gloo_pool: GlooPool, tmp_path: Path, replicate: int, kind: str
) -> None:
    gloo_pool.run(resumed, tmp_path, replicate, kind, world_size=4, timeout=300)


def ram_efficient(tied: bool) -> None:
    """Only the first rank has values, as after from_pretrained; the others train on them nevertheless."""
    runs = []
    for efficient in (True, False):
        with accelerate_state(fsdp=True), p3d.integrations.accelerate.use():
            model = tiny_model(tied=tied)
            if efficient and dist.get_rank() > 0:
                for parameter in model.parameters():
                    parameter.data.fill_(torch.nan)
            plugin = {"cpu_ram_efficient_loading": efficient}
            accelerator, model, optimizer, loader = prepared(model=model, plugin=plugin)
            assert isinstance(model, p3d.fsdp.FSDPModule)
            losses = steps(accelerator, model, optimizer, list(loader))
            runs.append((losses, whole_weights(model)))
    (losses, weights), (want, want_weights) = runs
    assert losses == want
    assert weights.keys() == want_weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in want_weights.items())


@pytest.mark.parametrize("tied", [False, True])
def test_cpu_ram_efficient_loading(gloo_pool: GlooPool, tied: bool) -> None:
    gloo_pool.run(ram_efficient, tied, world_size=2, timeout=300)


def bf16() -> None:
    """On an HSDP mesh of 2 x 2 each sum has two terms, so that both engines round alike."""
    results = []
    for ours in (True, False):
        with accelerate_state(fsdp=True):
            undo = p3d.integrations.accelerate.use() if ours else None
            try:
                accelerator, model, *rest = prepared(
                    torch.optim.SGD,
                    replicate=2,
                    mixed_precision="bf16",
                    model=tiny_model(dtype=torch.bfloat16),
                )
            finally:
                if undo:
                    undo.undo()
            assert isinstance(model, p3d.fsdp.FSDPModule) == ours
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            results.append(
                (steps(accelerator, model, rest[0], list(rest[1])), whole_weights(model))
            )
    (losses, weights), (theirs, their_weights) = results
    assert losses == theirs
    assert all(torch.equal(weights[name], value) for name, value in their_weights.items())


def test_bf16_is_that_of_fsdp2(gloo_pool: GlooPool) -> None:
    gloo_pool.run(bf16, world_size=4, timeout=300)


def trainer_of_accelerate() -> None:
    """transformers' own Trainer with fsdp=True, which shards by accelerate."""
    import transformers
    from _support.integrations.rows import difference
    from _support.integrations.transformers_rows import FSDP2, train

    class Checked(transformers.Trainer):
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            assert isinstance(self.model, p3d.fsdp.FSDPModule) == (undo is not None)
            return super().training_step(*args, **options)

    runs = []
    for ours in (True, False):
        with accelerate_state(fsdp=True):
            undo = p3d.integrations.accelerate.use() if ours else None
            try:
                runs.append(train(Checked, tiny_model(), 2, **FSDP2))
            finally:
                if undo:
                    undo.undo()
    assert max(difference(*runs)) < 1e-12


def test_trainer_with_fsdp_runs_on_it(gloo_pool: GlooPool) -> None:
    gloo_pool.run(trainer_of_accelerate, world_size=2, timeout=300)
