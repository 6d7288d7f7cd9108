"""A LightningModule as a user writes it, and a Trainer for it in a process of the pool."""

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import SumMetric

from _support.models import VOCAB, Lm, lm_loss, tokens

BATCH, STEPS = 8, 12  # samples of all data ranks together


class Module(LightningModule):
    """A language model; ``losses`` has the loss of each step, over the whole batch."""

    def __init__(self, dtype: torch.dtype = torch.float64, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Lm().to(dtype)
        self.make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        self.losses: list[float] = []
        self.counted = SumMetric()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = lm_loss(self.model, batch)
        whole = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.losses.append(float(whole))
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = lm_loss(self.model, batch)
        self.log("val", loss, sync_dist=True)
        self.counted.update(len(batch))
        self.log("counted", self.counted)
        self.log("samples", float(len(batch)), sync_dist=True, reduce_fx="sum")

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", lm_loss(self.model, batch), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TorchModule(Module):
    """The same as Lightning documents it for its ModelParallelStrategy."""

    def configure_model(self) -> None:
        mesh, layers = self.device_mesh, self.model.layers
        for layer in layers:
            if mesh["tensor_parallel"].size() > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, mesh["tensor_parallel"], plan)
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.model, mesh=mesh["data_parallel"])


def loader(
    layout: Any = None, batches: int = STEPS, batch: int = BATCH, first: int = 0
) -> DataLoader:
    """``batches`` batches of the whole job, which Lightning's sampler shares out over the data ranks."""
    samples: Any = [tokens(first + i, batch=1, vocab=VOCAB)[0] for i in range(batches * batch)]
    if layout is None:  # the order in which Lightning shuffles what it shares out
        sampler = DistributedSampler(samples, num_replicas=1, rank=0)
        return DataLoader(samples, batch_size=batch, sampler=sampler)
    return DataLoader(samples, batch_size=batch // layout.data_size)


@contextlib.contextmanager
def as_torchrun() -> Iterator[Path]:
    """The environment of torchrun, for the processes of the pool; a folder that all ranks share."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    known = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_WORLD_SIZE": dist.get_world_size(),
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,  # nobody connects: the process group exists
        "TORCHELASTIC_RUN_ID": "pool",
    }
    with mock.patch.dict(os.environ, {name: str(value) for name, value in known.items()}):
        yield Path(shared[0])
        dist.barrier()


def trainer(strategy: Any = "auto", **options: Any) -> Trainer:
    """A quiet Trainer on all ranks; plain, on this process alone, without a strategy."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "auto" else dist.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if strategy == "auto":  # one process, whatever the environment says
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.pytorch.strategies import SingleDeviceStrategy

        strategy = SingleDeviceStrategy(torch.device("cpu"))
        settings["plugins"] = LightningEnvironment()
    return Trainer(strategy=strategy, **settings | options)


def plain(batches: int = STEPS, made: Any = None, **options: Any) -> Module:
    """The Module after a plain Trainer's fit, in this process."""
    module = made or Module()
    trainer(**options).fit(module, loader(batches=batches))
    return module
