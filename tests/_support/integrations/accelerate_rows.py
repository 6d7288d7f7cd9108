"""accelerate's FSDP2 path on this engine, and on torch's."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from _support.integrations.hf import accelerate_state, loss_in_float64, tiny_model, tiny_rows
from _support.integrations.rows import STEPS, Result, Row, Run, difference, whole_weights

ROWS_PER_STEP = 8


def fsdp2(**changes: Any) -> Any:
    """accelerate's plugin for the tiny model."""
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["StableLmDecoderLayer"],
        **{"cpu_ram_efficient_loading": False, **changes},
    )


def train(
    replicate: int = 1,
    *,
    sharded: bool = True,
    micro_batches: int = 1,
    clip: float | None = None,
    tied: bool = False,
    **plugin: Any,
) -> Run:
    """A user's program with accelerate, on all ranks or, without ``sharded``, on this one."""
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    ranks = torch.distributed.get_world_size() if sharded else 1
    config = None
    if replicate > 1 and sharded:
        config = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=ranks // replicate)
    accelerator = Accelerator(
        cpu=not sharded,
        fsdp_plugin=fsdp2(**plugin) if sharded else None,
        parallelism_config=config,
        gradient_accumulation_steps=micro_batches,
    )
    model = tiny_model(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = tiny_rows(ROWS_PER_STEP * STEPS, masked=False)
    loader = DataLoader(rows, batch_size=ROWS_PER_STEP // micro_batches // ranks)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_in_float64(model(input_ids=batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    names = (name.replace("_checkpoint_wrapped_module.", "") for name in whole_weights(model))
    return Run(losses, dict(zip(names, whole_weights(model).values(), strict=True)))


def compare(replicate: int, options: dict[str, Any]) -> Result:
    from parallel3d.integrations.accelerate import use

    with accelerate_state(alone=True):
        alone = {k: v for k, v in options.items() if k != "activation_checkpointing"}
        plain = train(sharded=False, **alone)
    differences = []
    for engine in (use, nullcontext):
        with accelerate_state(fsdp=True), engine():
            differences.append(difference(train(replicate, **options), plain))
    return Result(*differences)


_PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, clipping": {"micro_batches": 2, "clip": 0.5},
    "tied weights": {"tied": True},
    "activation checkpointing": {"activation_checkpointing": True},
}
_row = partial(Row, packages=("accelerate",), lines=1, peer="FSDP2", run=compare)
ROWS = [
    _row(f"accelerate: {name}", mesh=(n, 4 // n, 1), arguments=(n, options))
    for name, options in _PROGRAMS.items()
    for n in (1, 2)
]
