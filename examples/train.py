"""Trains a small Llama on bytes of real text, on any (replicate, shard, tp) mesh.

    torchrun --nproc-per-node 8 examples/train.py --replicate 2 --shard 2 --tp 2 --check

Without torchrun it trains in one process. The weights depend on the seed alone and the data's order on
(seed, sample number) alone, so every mesh trains the same model; ``--check`` shows that it does.

With ``--checkpoint FOLDER`` it saves, and goes on from what is saved there: after a crash under
``torchrun --max-restarts 3``, or when it is started again, also on another number of processes or another
mesh. No sample is consumed twice or left out. SIGTERM and SIGUSR1 (SLURM's ``--signal``; give torchrun
``--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``) lead to a last checkpoint and a clean end.
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
from run import Run
from step_log import StepLog
from text import Samples, read_text
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
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
    nano = "nano"
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
    double: Annotated[bool, Option("--double", help="Weights and computation in float64.")] = False,
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
    checkpoint: Annotated[
        Path | None, Option(help="Folder to save to, and to go on from if it has a checkpoint.")
    ] = None,
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 100,
    keep: Annotated[int, Option(min=1, help="Checkpoints to leave there.")] = 3,
    async_save: Annotated[
        bool, Option("--async-save", help="Write checkpoints in the background.")
    ] = False,
    step_log: Annotated[
        Path | None, Option(help="File to append to: what each step consumed, and its loss.")
    ] = None,
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
    samples = Samples(read_text_for(config, data), config.max_seq_len, seed=seed)
    check_sizes(config, layout, batch)

    with torch.device("meta"):
        model = Llama(config)
    if double:
        model.double()
    report = Report(steps, batch * config.max_seq_len, quiet=rank != 0)
    report.print(f"{layout}, {device.type}")
    if tp > 1:
        report.print(p3d.resolve_plan(model, LLAMA_TP_PLAN, tp_size=tp))
    p3d.parallelize(
        model,
        mesh,
        tp_plan=LLAMA_TP_PLAN,
        mp_policy=BF16 if mixed_precision else p3d.MixedPrecisionPolicy(),
        shard_optimizer_over_replicate=hfsdp,
    )
    p3d.materialize(model, device=device, seed=seed)
    report.print(describe_parameters(model, device))

    trainer = Trainer(model, p3d.optim.clip_grad_norm_, lr=lr, steps=steps)
    fixed = {"--seed": seed, "--size": str(size), "--lr": lr, "--data": samples.digest}
    run = Run(checkpoint, fixed, every=save_every, keep=keep, background=async_save)
    resumed = run.resume(*trainer.state)
    if resumed:
        report.print(f"goes on from {resumed}")
        report.go_on_from(run.step)
    if run.step >= steps:
        report.print(f"nothing to do: all {steps} steps are done")
        StepLog(step_log, layout, device).end(run.step, run.samples, model)
        dist.destroy_process_group()
        return
    first_steps = check and not resumed  # the plain model starts from the beginning
    checker = Checker(config, device, lr=lr, steps=steps, seed=seed) if first_steps else None

    consumed = StepLog(step_log, layout, device)
    consumed.start(run.step, run.samples)
    rows, data_rank = batch // layout.data_size, layout.data_rank(rank)
    # Watched, so that a rank that fails ends all, and each says which it was, and why.
    with p3d.guards.watch(), report, p3d.checkpoint.StopSignal() as stop:
        while run.step < steps:
            p3d.seed_step(mesh, seed=seed, step=run.step)
            tokens = samples.batch(run.samples + data_rank * rows, rows)
            start = time.perf_counter()
            loss, norm = trainer.step(tokens.to(device))
            loss_value, stopping = agree(loss, stop.requested)
            seconds = time.perf_counter() - start
            report.step(loss_value, norm.item(), seconds)
            consumed.step(run.step, run.samples, tokens, loss=loss_value, norm=norm.item())
            if checker and run.step < CHECK_STEPS:
                whole = samples.batch(run.samples, batch)
                checker.step(whole.to(device), loss_value, norm.item())
            run.advance(batch)
            if checker and run.step == min(CHECK_STEPS, steps):
                checker.compare_weights(model)
                report.print(checker)
            if stopping or run.step == steps or run.is_due():
                run.save(*trainer.state)
            if stopping:
                break
        run.wait()
    consumed.end(run.step, run.samples, model)
    if stopping:
        report.print(f"asked to stop: after step {run.step}, {run.where}")
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
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    @property
    def state(self) -> tuple[nn.Module, Optimizer, LRScheduler]:
        """What a checkpoint holds of it."""
        return self.model, self.optimizer, self.schedule

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq + 1) token ids -> (mean loss over them, gradient norm over all ranks)."""
        logits = self.model(tokens[:, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = losses.double().mean()  # a sum in float32 would depend on how many ranks share it
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


def agree(loss: Tensor, stop: bool) -> tuple[float, bool]:
    """(mean loss, whether any rank is to stop), the same on all ranks, by one all-reduce.

    The mean over all ranks is that over data ranks: those of one tp group have equal losses.
    """
    both = torch.stack([loss.double(), torch.full_like(loss, stop, dtype=torch.double)])
    if dist.get_world_size() > 1:
        dist.all_reduce(both)
    total, stopping = both.tolist()
    return total / dist.get_world_size(), stopping > 0


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
