"""Lightning: the strategy of parallel3d beside Lightning's own on torch's FSDP2."""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

import parallel3d as p3d
from _support.integrations.lightning_programs import (
    Module,
    TorchModule,
    as_torchrun,
    loader,
    plain,
    trainer,
)
from _support.integrations.rows import Result, Row, Run, difference, whole_weights


def fit(module: Module, strategy: Any, layout: p3d.MeshLayout, options: dict[str, Any]) -> Run:
    trainer(strategy, **options).fit(module, loader(layout))
    return Run(module.losses, whole_weights(module))


def run(layout: p3d.MeshLayout, options: dict[str, Any]) -> Result:
    """The Trainer of one process, of ours, and of ModelParallelStrategy, which has no replicate axis."""
    with as_torchrun():
        alone = plain(**options)
        wanted = Run(alone.losses, whole_weights(alone))
        plan = "auto" if layout.tp > 1 else None
        strategy = p3d.integrations.lightning.Strategy(layout, tp_plan=plan)
        ours = difference(fit(Module(), strategy, layout, options), wanted)
        theirs = ModelParallelStrategy(layout.data_size, layout.tp)
        peers = difference(fit(TorchModule(), theirs, layout, options), wanted)
    return Result(ours, peers)


def row(name: str, layout: p3d.MeshLayout, note: str = "", **options: Any) -> Row:
    packages, peer = ("lightning",), "ModelParallelStrategy, FSDP2"
    return Row(
        f"lightning: {name}", packages, 1, layout.sizes, peer, run, (layout, options), note=note
    )


ROWS = [
    row("fit, clipping", p3d.MeshLayout(shard=4), gradient_clip_val=0.3),
    row(
        "fit, clipping",
        p3d.MeshLayout(replicate=2, shard=2),
        "the peer has no replicate axis and shards over 4",
        gradient_clip_val=0.3,
    ),
    row('fit, tp_plan="auto"', p3d.MeshLayout(shard=2, tp=2)),
]
