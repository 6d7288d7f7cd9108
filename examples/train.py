"""Trains a small Llama on bytes of real text, on any (replicate, shard, tp) mesh.

    torchrun --nproc-per-node 8 examples/train.py --replicate 2 --shard 2 --tp 2 --check

Without torchrun it trains in one process. The weights depend on the seed alone and the batches on
(seed, step) alone, so every mesh trains the same model; ``--check`` shows that it does.
"""

import logging
import math
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from llama import Llama, LlamaConfig
from report import Report
from text import batch_of, read_text
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from typer import Option

import parallel3d as p3d

LLAMA_TP_PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise_gather_output",
}
"""What tensor parallelism does with each module: the only place that says so."""

BF16 = p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CHECK_STEPS = 20
WARMUP_STEPS = 20
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Size(StrEnum):
    tiny = "tiny"
    small = "small"


@app.command()
def main(
    replicate: Annotated[int, Option(help="Copies of the sharded model (HSDP).")] = 1,
    shard: Annotated[int, Option(help="Ranks that share one copy; -1: all there are.")] = -1,
    tp: Annotated[int, Option(help="Ranks that share each layer's computation.")] = 1,
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 300,
    size: Annotated[Size, Option(help="Size of the model.")] = Size.tiny,
    batch: Annotated[int, Option(min=1, help="Sequences per step, over all ranks.")] = 16,
    lr: Annotated[float, Option(help="Peak learning rate.")] = 2e-3,
    mixed_precision: Annotated[
        bool, Option("--mixed-precision", help="Compute in bfloat16, reduce in float32.")
    ] = False,
    hfsdp: Annotated[
        bool, Option("--hfsdp", help="Shard the optimizer's state over replicas too.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Of weights and batches.")] = 0,
    data: Annotated[
        Path | None, Option(help="File or folder; by default Python's own source.")
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Compare the first steps with the plain model.")
    ] = False,
) -> None:
    """Trains a byte-level language model; start it with torchrun to use several ranks."""
    # torch explains at length, on every rank, how it gathers a weight for the check.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    layout = p3d.MeshLayout(replicate, shard, tp)
    mesh = p3d.build_mesh(layout)
    layout = layout.resolve(mesh.size())
    rank, device = dist.get_rank(), torch.device(mesh.device_type)
    if mesh.size() > 1:
        torch.set_num_threads(1)  # on a CPU the ranks are what runs in parallel
    config = LlamaConfig.named(size)
    text = read_text_for(config, data)
    check_sizes(config, layout, batch)

    with torch.device("meta"):
        model = Llama(config)
    report = Report(steps, batch * config.max_seq_len, quiet=rank != 0)
    report.print(f"{layout}, {device.type}")
    if tp > 1:
        report.print(p3d.resolve_plan(model, LLAMA_TP_PLAN, tp_size=tp))
    policy = BF16 if mixed_precision else p3d.MixedPrecisionPolicy()
    p3d.parallelize(
        model,
        mesh,
        tp_plan=LLAMA_TP_PLAN,
        mp_policy=policy,
        shard_optimizer_over_replicate=hfsdp,
    )
    p3d.materialize(model, device=device, seed=seed)
    report.print(describe_parameters(model, device))

    trainer = Trainer(model, p3d.optim.clip_grad_norm_, lr=lr, steps=steps)
    checker = Checker(config, device, lr=lr, steps=steps, seed=seed) if check else None
    data_rank = layout.data_rank(rank)
    with report:
        for step in range(steps):
            tokens = batch_of(text, batch, config.max_seq_len, seed=seed, step=step)
            start = time.perf_counter()
            loss, norm = trainer.step(tokens.chunk(layout.data_size)[data_rank].to(device))
            loss_value = mean_over_ranks(loss).item()
            report.step(loss_value, norm.item(), time.perf_counter() - start)
            if checker and step < CHECK_STEPS:
                checker.step(tokens.to(device), loss_value, norm.item())
            if checker and step + 1 == min(CHECK_STEPS, steps):
                checker.compare_weights(model)
                report.print(checker)
    report.print(f"result {report.result}{checker.result if checker else ''}")
    dist.destroy_process_group()
    if checker and checker.failed(tolerance=5e-2 if mixed_precision else 1e-4):
        sys.exit(f"error: the parallel model does not follow the plain one: {checker}")


class Trainer:
    """A model, its optimizer and the learning rate's schedule: the same for a plain model."""

    def __init__(
        self, model: nn.Module, clip: Callable[..., Tensor], *, lr: float, steps: int
    ) -> None:
        def factor(step: int) -> float:
            """Linear warm-up, then half a cosine down to a tenth."""
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
            return min((step + 1) / WARMUP_STEPS, cosine)

        self.model, self.clip = model, clip
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq + 1) token ids -> (mean loss over them, gradient norm over all ranks)."""
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach(), norm


class Checker:
    """On rank 0, trains the plain model on the whole batches; keeps the largest differences."""

    def __init__(
        self, config: LlamaConfig, device: torch.device, *, lr: float, steps: int, seed: int
    ) -> None:
        self.plain: Trainer | None = None
        self.largest = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
        if dist.get_rank() == 0:
            with torch.device("meta"):
                model = Llama(config)
            p3d.materialize(model, device=device, seed=seed)
            self.plain = Trainer(model, nn.utils.clip_grad_norm_, lr=lr, steps=steps)

    def step(self, tokens: Tensor, loss: float, norm: float) -> None:
        """Trains the plain model for a step and compares it with the parallel one's results."""
        if self.plain is not None:
            plain_loss, plain_norm = self.plain.step(tokens)
            self._note("loss", abs(loss - plain_loss.item()))
            self._note("grad_norm", abs(norm - plain_norm.item()))

    def compare_weights(self, model: nn.Module) -> None:
        """Gathers each of the parallel model's weights; a collective, so all ranks take part."""
        plain = dict(self.plain.model.named_parameters()) if self.plain else {}
        for name, param in model.named_parameters():
            weight = param.detach()
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if self.plain is not None:
                self._note("weights", (whole - plain[name]).abs().max().item())

    def failed(self, tolerance: float) -> bool:
        """Whether the loss went its own way; NaN counts as that."""
        return not self.largest["loss"] <= tolerance

    @property
    def result(self) -> str:
        return "".join(f" check_{name}={value:.2e}" for name, value in self.largest.items())

    def __str__(self) -> str:
        differences = (f"{name} {value:.2e}" for name, value in self.largest.items())
        return f"check: largest difference to the plain model: {', '.join(differences)}"

    def _note(self, name: str, difference: float) -> None:
        if not difference <= self.largest[name]:  # so that a NaN stays
            self.largest[name] = difference


def read_text_for(config: LlamaConfig, path: Path | None) -> Tensor:
    """The text to train on; an error if there is not even one sequence in it."""
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise typer.BadParameter(f"--data: {error}") from None
    if len(text) <= config.max_seq_len:
        raise typer.BadParameter(
            f"--data {path}: {len(text)} bytes, but a sequence takes {config.max_seq_len + 1}"
        )
    return text


def check_sizes(config: LlamaConfig, layout: p3d.MeshLayout, batch: int) -> None:
    """Refuses what the mesh does not divide: rows of the batch by data ranks, heads by tp ranks."""
    if batch % layout.data_size:
        nearest = math.ceil(batch / layout.data_size) * layout.data_size
        raise typer.BadParameter(
            f"--batch {batch} is not divisible by the {layout.data_size} data ranks "
            f"(replicate x shard) of {layout}; the next that is: {nearest}"
        )
    if config.n_kv_heads % layout.tp:
        raise typer.BadParameter(
            f"--tp {layout.tp}: the model's {config.n_kv_heads} key and value heads can't be "
            f"shared evenly; --tp must divide {config.n_kv_heads}"
        )


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The mean over all ranks is that over data ranks: those of one tp group have equal losses."""
    if dist.get_world_size() > 1:
        dist.all_reduce(loss)
    return loss / dist.get_world_size()


def describe_parameters(model: nn.Module, device: torch.device) -> str:
    """How many parameters there are, and the most that a rank holds of them."""
    params = [p.detach() for p in model.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    held = [sum(t.numel() for t in local), sum(t.numel() * t.element_size() for t in local)]
    most = torch.tensor(held, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    count, size = most.tolist()
    return (
        f"{sum(p.numel() for p in params):,} parameters; "
        f"a rank holds at most {count:,} ({size / 2**20:.2f} MiB)"
    )


if __name__ == "__main__":
    try:
        app()
    except p3d.Parallel3dError as error:
        sys.exit(f"error: {error}")
