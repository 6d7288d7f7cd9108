"""Trains a small Llama on bytes of real text, on any (replicate, shard, cp, tp) mesh.

    torchrun --nproc-per-node 8 examples/llama/train.py --replicate 2 --shard 2 --tp 2 --check

Without torchrun it trains in one process. The weights depend on the seed alone and the data's order on
(seed, sample number) alone, so every mesh trains the same model; ``--check`` shows that it does.

With ``--checkpoint FOLDER`` it saves, and resumes from what is saved there: after a crash under
``torchrun --max-restarts 3``, or when it is started again, also on another number of processes or another
mesh. No sample is consumed twice or left out. SIGTERM and SIGUSR1 (SLURM's ``--signal``; give torchrun
``--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``) lead to a last checkpoint and a clean end.
"""

import json
import logging
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from starting import announce, is_first_rank, since_start

if __name__ == "__main__":
    announce()

import torch
from checker import CHECK_STEPS, Checker
from llama import Llama
from options import LossParallel, Options, Recompute, UsageError, parse
from plans import LLAMA_SEQUENCE_PLAN, LLAMA_TP_PLAN
from run import Run
from step_log import StepLog
from text import Samples, read_text
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from training import Schedule, Trainer

import parallel3d as p3d
from parallel3d.observability import (
    JsonLines,
    Metrics,
    ModelFlops,
    OomSnapshots,
    Progress,
    Sink,
    TensorBoard,
    model_flops,
)
from parallel3d.tools.dryrun import active, assume

BF16 = p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EXAMPLE: Any = (torch.ones(2, 16, dtype=torch.int64), torch.arange(16).expand(2, -1)), {}
"""Of the model's forward under cp: with positions, which shard_batch cuts as it does the tokens."""
LOSS_PARALLEL: dict[str, bool | str] = {
    LossParallel.none: False,
    LossParallel.split_over_tp: True,
    LossParallel.chunked: "chunked",
}


def main(options: Options) -> None:
    """Trains a byte-level language model; start it with torchrun to use several ranks."""
    # torch explains at length, on every rank, how it gathers a weight for the check.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    layout = p3d.MeshLayout(options.replicate, options.shard, options.tp, cp=options.cp)
    mesh = p3d.build_mesh(layout)
    layout = layout.resolve(mesh.size())
    rank, device = dist.get_rank(), torch.device(mesh.device_type)
    if mesh.size() > 1 and device.type == "cpu":
        torch.set_num_threads(1)  # the ranks are what runs in parallel
    config, steps, seed = options.model, options.steps, options.seed
    samples = Samples(
        read_text_for(config.max_seq_len, options.data), config.max_seq_len, seed=seed
    )
    options.check_sizes(layout)

    report = Progress(steps, quiet=rank != 0 or options.json)

    def say(text: str) -> None:
        report.print(since_start(text))

    say(f"mesh: {layout}, {'a dry run of one' if active() else device.type}")
    say(f"text: {len(samples.text):,} bytes, {len(samples):,} sequences of {samples.seq_len}")
    model, flops, plan = build_model(options, mesh)
    if plan is not None:
        say(f"plan: {plan.summary()}")
        if options.show_plan:
            report.print(plan)
    p3d.materialize(model, device=device, seed=seed)
    say(f"weights: {describe_parameters(model, device)}")

    schedule = Schedule(options.lr, steps, options.warmup_steps)
    trainer = Trainer(
        model,
        p3d.optim.clip_grad_norm_,
        schedule,
        micro_batch=options.micro_batch,
        accumulate=p3d.optim.accumulate,
        cut=partial(p3d.cp.shard_batch, mesh=mesh) if layout.cp > 1 else None,
        before_micro_batch=lambda number: p3d.seed_step(
            mesh, seed=seed, step=run.step, micro_batch=number
        ),
        optimizer=partial(p3d.optim.local, torch.optim.AdamW),
    )
    run = Run(
        options.checkpoint,
        {**options.fixed, "--data": samples.digest},
        every=options.save_every,
        keep=options.keep,
        background=options.async_save,
    )
    resumed = run.resume(*trainer.state)
    if resumed:
        say(f"continues {resumed}")
        report.go_on_from(run.step)
    if run.step >= steps:
        say(f"nothing to do: all {steps} steps are done")
        StepLog(options.step_log, layout, device).end(run.step, run.samples, model)
        dist.destroy_process_group()
        return
    first_steps = options.check and not resumed  # the plain model starts from the beginning
    checker = None
    if first_steps:
        checker = Checker(
            config,
            device,
            options.torch_dtype,
            schedule,
            seed=seed,
            tolerance=5e-2 if options.mixed_precision else 1e-4,
        )

    consumed = StepLog(options.step_log, layout, device)
    rows, data_rank = options.batch // layout.data_size, layout.data_rank(rank)
    metrics = make_metrics(options, mesh, report, flops)
    # Watched, so that a rank that fails ends all, and each says which it was, and why.
    with p3d.guards.watch(), report, metrics, p3d.checkpoint.StopSignal() as stop:
        consumed.start(run.step, run.samples)
        while run.step < steps:
            with metrics.step(run.step):
                with metrics.loading_data():
                    tokens = samples.batch(run.samples + data_rank * rows, rows)
                    inputs = tokens.to(device)
                metrics.log(lr=trainer.schedule.get_last_lr()[0])
                loss, norm = trainer.step(inputs)
                loss_value, stopping = agree(loss, stop.requested)
                metrics.log(loss=loss_value, grad_norm=norm.item())
            consumed.step(run.step, run.samples, tokens, loss=loss_value, norm=norm.item())
            if checker and run.step < CHECK_STEPS:
                whole = samples.batch(run.samples, options.batch)
                checker.step(whole.to(device), loss_value, norm.item())
            run.advance(options.batch)
            if checker and run.step == min(CHECK_STEPS, steps):
                checker.compare_weights(model)
                report.print(checker)
            if stopping or run.step == steps or run.is_due():
                run.save(*trainer.state)
            if stopping:
                break
        run.wait()
    consumed.end(run.step, run.samples, model)
    if rank == 0:
        result = {**report.result, **(checker.result if checker else {})}
        if options.json:
            print(json.dumps(result), flush=True)
        report.print(
            f"stopped after step {run.step}; {run.where}"
            if stopping
            else f"done: {run.step} steps, loss {result['loss']:.4f}, "
            f"{result['tokens_per_second']:,.0f} tokens/s, {result['seconds']:.0f} s"
        )
    dist.destroy_process_group()
    if checker and checker.failed:
        sys.exit(1)
    if stop.received is signal.SIGINT:
        sys.exit(128 + signal.SIGINT)


def build_model(
    options: Options, mesh: DeviceMesh
) -> tuple[nn.Module, ModelFlops | None, p3d.tp.ResolvedPlan | None]:
    """The parallel model, still without values, its FLOPs if someone asks, and the plan if tp splits it."""
    with torch.device("meta"):
        model = Llama(options.model).to(options.torch_dtype)
    flops = None
    known_peak = mesh.device_type != "cpu" or options.peak_tflops is not None
    if known_peak and dist.get_rank() == 0 and not active():
        flops = model_flops(model, options.model.max_seq_len)
    plan = LLAMA_SEQUENCE_PLAN if options.sequence_parallel else LLAMA_TP_PLAN
    resolved = p3d.resolve_plan(model, plan, tp_size=options.tp) if options.tp > 1 else None
    p3d.parallelize(
        model,
        mesh,
        tp_plan=plan,
        mp_policy=BF16 if options.mixed_precision else p3d.MixedPrecisionPolicy(),
        fsdp=p3d.Sharding(
            reshard_after_forward=not options.no_reshard,
            shard_optimizer_over_replicate=options.hfsdp,
        ),
        activation_checkpointing=recomputed(options),
        context_parallel=str(options.cp_attention),
        checks=p3d.Checks(example=EXAMPLE if options.cp > 1 else None),
        compile=options.compile,
        loss_parallel=LOSS_PARALLEL[options.loss_parallel],
    )
    return model, flops, resolved


def recomputed(options: Options) -> Any:
    """What ``parallelize`` takes for ``--activation-checkpointing``."""
    kinds: dict[str, Any] = {
        Recompute.none: False,
        Recompute.selective: "selective",
        Recompute.offload: p3d.ActivationOffload(pool_gib=options.offload_gib),
        Recompute.full: True,
    }
    return kinds[options.activation_checkpointing]


def make_metrics(
    options: Options, mesh: DeviceMesh, report: Progress, flops: ModelFlops | None
) -> Metrics:
    """What measures each step, and where that goes."""
    sinks: list[Sink] = [report]
    if options.metrics is not None:
        sinks.append(JsonLines(options.metrics))
    if options.tensorboard is not None:
        sinks.append(TensorBoard(options.tensorboard))
    return Metrics(
        mesh,
        tokens_per_step=options.batch * options.model.max_seq_len,
        sinks=sinks,
        every=options.metrics_every,
        flops=flops,
        peak_tflops=options.peak_tflops,
        profiler=options.window,
        snapshots=OomSnapshots(options.traces) if options.oom_snapshots else None,
    )


def read_text_for(seq_len: int, path: Path | None) -> bytes:
    """The text to train on; an error if there is not even one sequence in it."""
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise UsageError(f"--data: {error}") from None
    if len(text) <= seq_len:
        raise UsageError(f"--data {path}: {len(text)} bytes, but a sequence takes {seq_len + 1}")
    return text


def agree(loss: Tensor, stop: bool) -> tuple[float, bool]:
    """(mean loss, whether any rank is to stop), the same on all ranks, by one all-reduce.

    The mean over all ranks is that over data ranks: those of one tp group have equal losses.
    """
    both = torch.stack([loss.double(), torch.full_like(loss, stop, dtype=torch.double)])
    if dist.get_world_size() > 1:
        dist.all_reduce(both)
    total, stopping = both.tolist()
    return total / dist.get_world_size(), assume(stopping, 0.0) > 0  # in a dry run nobody asks


def describe_parameters(model: nn.Module, device: torch.device) -> str:
    """How many parameters there are, and the most that a rank holds of them."""
    params = [p.detach() for p in model.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    held = [sum(t.numel() for t in local), sum(t.numel() * t.element_size() for t in local)]
    most = torch.tensor(held, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    count, size = (assume(n, mine) for n, mine in zip(most.tolist(), held, strict=True))
    return (
        f"{sum(p.numel() for p in params):,} parameters; "
        f"a rank holds at most {count:,} ({size / 2**20:.2f} MiB)"
    )


if __name__ == "__main__":
    try:
        main(
            parse(
                "Trains a byte-level language model; start it with torchrun to use several ranks."
            )
        )
    except UsageError as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(1)  # a launcher ends all ranks when one has ended
        sys.exit(2)
    except p3d.Parallel3dError:
        sys.tracebacklimit = 0  # its text says all; the first rank prints it if all have the same
        raise
