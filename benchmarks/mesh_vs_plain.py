"""The main job on a mesh beside the same training without one: does it learn the same?

    python benchmarks/mesh_vs_plain.py [--steps N] [--replicate 2 --shard 2 --tp 2] [--json PATH]

Three runs with the same seed, text and schedule, one after another: ``examples/llama/train.py --check`` under
torchrun; the same script in one process, where the engine has nothing to communicate; and the plain
model with torch's optimizer and clipping, without the engine. Exits with 1 where a bar is missed:

- on the mesh the loss stays within 1e-4 of the plain model's over the first 20 steps;
- at the last step it is within 0.02 of the plain model's, so is the one process's;
- the smoothed loss ends under 2.3 (only where there are at least 200 steps to get there).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from measure import print_table, write_json
from torch import nn

import parallel3d as p3d

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "llama"
CHECK_BAR = 1e-4
LAST_BAR = 0.02
SMOOTHED_BAR = 2.3
SMOOTHED_FROM_STEPS = 200
BATCH, LEARNING_RATE, SEED = 16, 2e-3, 0

Result = dict[str, float]


def run_example(command: list[str], options: list[str]) -> Result:
    """Runs ``examples/llama/train.py``; the numbers that it prints with ``--json``.

    Raises:
        RuntimeError: it ended without them.
    """
    start = time.perf_counter()
    full = [*command, str(EXAMPLES / "train.py"), *options, "--json"]
    print("$", " ".join(full), flush=True)
    done = subprocess.run(full, stdout=subprocess.PIPE, text=True)
    # Its own check may have failed, with an exit code; here the numbers decide.
    if not done.stdout:
        raise RuntimeError(f"no result; exit code {done.returncode}")
    result: Result = json.loads(done.stdout)
    return result | {"wall_seconds": time.perf_counter() - start}


def run_plain(steps: int) -> Result:
    """The same training of the plain model, with nothing of the library but its initial weights."""
    sys.path.insert(0, str(EXAMPLES))
    from llama import Llama, LlamaConfig
    from text import Samples
    from train import read_text_for
    from training import Schedule, Trainer

    from parallel3d.observability.progress import WINDOW

    start = time.perf_counter()
    config = LlamaConfig.named("tiny")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator if accelerator is not None else torch.device("cpu")
    with torch.device("meta"):
        model = Llama(config)
    p3d.materialize(model, device=device, seed=SEED)
    trainer = Trainer(model, nn.utils.clip_grad_norm_, Schedule(LEARNING_RATE, steps))
    samples = Samples(read_text_for(config.max_seq_len, None), config.max_seq_len, seed=SEED)
    losses = []
    for step in range(steps):
        loss, _ = trainer.step(samples.batch(step * BATCH, BATCH).to(device))
        losses.append(loss.item())
    last = losses[-WINDOW:]
    return {
        "loss": losses[-1],
        "smoothed_loss": sum(last) / len(last),
        "wall_seconds": time.perf_counter() - start,
    }


def missed_bars(results: dict[str, Result], steps: int) -> list[str]:
    """What is not as it should be; a nan misses every bar."""
    mesh, plain = results["mesh"], results["plain"]
    missed = []
    if not mesh["check_loss"] <= CHECK_BAR:
        missed.append(f"first steps: loss {mesh['check_loss']:.2e} from plain, over {CHECK_BAR:g}")
    for name, result in results.items():
        difference = abs(result["loss"] - plain["loss"])
        if not difference <= LAST_BAR:
            missed.append(f"{name}: last loss {difference:.4f} from plain, over {LAST_BAR:g}")
    if steps >= SMOOTHED_FROM_STEPS and not mesh["smoothed_loss"] < SMOOTHED_BAR:
        missed.append(f"mesh: smoothed loss {mesh['smoothed_loss']:.3f}, not under {SMOOTHED_BAR}")
    return missed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for axis in ("replicate", "shard", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    axes = {axis: getattr(options, axis) for axis in ("replicate", "shard", "tp")}
    ranks = p3d.MeshLayout(**axes).world_size

    same = ["--steps", str(options.steps), "--batch", str(BATCH), "--seed", str(SEED)]
    same += ["--lr", str(LEARNING_RATE), "--size", "tiny"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(ranks)]
    on_mesh = [part for axis, size in axes.items() for part in (f"--{axis}", str(size))]
    results = {
        "mesh": run_example(torchrun, [*on_mesh, "--check", *same]),
        "one process": run_example([sys.executable], same),
    }
    print("the plain model, in this process", flush=True)
    results["plain"] = run_plain(options.steps)

    plain = results["plain"]
    print_table(
        f"{options.steps} steps on {tuple(axes.values())} and without a mesh; largest difference of "
        f"loss over the first 20 steps: {results['mesh']['check_loss']:.1e}",
        ["run", "last loss", "from plain", "smoothed loss", "seconds"],
        [
            [name, f"{r['loss']:.4f}", f"{abs(r['loss'] - plain['loss']):.1e}"]
            + [f"{r['smoothed_loss']:.4f}", f"{r['wall_seconds']:.0f}"]
            for name, r in results.items()
        ],
    )
    missed = missed_bars(results, options.steps)
    if options.json:
        write_json(options.json, {"axes": axes, **results, "missed": missed})
    if missed:
        sys.exit("\n".join(["missed:", *missed]))
    print("all bars met")


if __name__ == "__main__":
    main()
