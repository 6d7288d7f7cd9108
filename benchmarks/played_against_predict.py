"""The planner's ``predict`` beside the streams that a dry run plays, over some 230 layouts and settings.

    python benchmarks/played_against_predict.py [--only PART] [--json PATH]

Both take a kernel's and a collective's seconds from the planner. ``predict`` adds them up unit by unit, by
formulas; the dry run records what the library does with a model, operation by operation, and plays it on
streams. So where they differ one of them is wrong about what is done, or when. What only ``predict`` has is
left out of it: stragglers, and the host's time for the hooks of a unit. Five minutes; a part of a case's name
chooses some of them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "llama"))

from llama import Llama, LlamaConfig
from measure import print_table
from plans import LLAMA_SEQUENCE_PLAN, LLAMA_TP_PLAN

import parallel3d as p3d
from parallel3d.planner import Cluster, ModelSpec, Prediction, Workload, predict, spec_from_module
from parallel3d.planner.stacks import stack_of
from parallel3d.tools.dryrun import DryRun, record, timeline

MODELS = {
    "wide": LlamaConfig(4096, 3, 32, 8, 14336, 32_000, 4096),
    "tied": LlamaConfig(2048, 4, 32, 8, 8192, 128_256, 4096, tied=True),
}
MACHINES = {
    "h100": ("h100-80gb-sxm", None),
    "h100, 10 GB/s": ("h100-80gb-sxm", 10.0),
    "a100": ("a100-80gb-sxm", None),
}
KINDS: dict[str, Any] = {
    "none": False,
    "full": True,
    "selective": "selective",
    "offload": p3d.ActivationOffload(pool_gib=256),
}
# (replicate, shard, cp, tp)
LAYOUTS = (
    *((1, n, 1, 1) for n in (1, 2, 3, 4, 8, 16, 32, 64)),
    *(
        (2, 2, 1, 1),
        (2, 4, 1, 1),
        (2, 8, 1, 1),
        (4, 8, 1, 1),
        (8, 8, 1, 1),
        (3, 4, 1, 1),
        (8, 1, 1, 1),
    ),
    *(
        (1, 1, 1, 2),
        (1, 1, 1, 4),
        (1, 1, 1, 8),
        (1, 4, 1, 2),
        (1, 8, 1, 2),
        (1, 3, 1, 2),
        (1, 8, 1, 4),
    ),
    *((1, 8, 1, 8), (2, 4, 1, 2), (2, 2, 1, 4), (2, 4, 1, 8), (4, 1, 1, 2)),
    *(
        (1, 1, 2, 1),
        (1, 1, 4, 1),
        (1, 1, 8, 1),
        (1, 4, 2, 1),
        (1, 2, 4, 1),
        (2, 2, 2, 1),
        (1, 8, 8, 1),
    ),
    *((1, 2, 2, 2), (2, 2, 2, 2), (1, 2, 2, 4), (1, 4, 2, 8)),
)
LIMIT = 0.05
REASONS: tuple[tuple[Callable[[Any], bool], float, str], ...] = (
    (
        lambda case: case.checkpointing == "offload",
        0.14,
        "offload, with few tokens or a slow network: copies and collectives both outlast the computation "
        "and wait for one another; predict has them side by side",
    ),
    (
        lambda case: not case.reshard_after_forward and case.layout[1] * case.layout[2] > 1,
        0.07,
        "parameters kept for backward: predict has compute wait for a reduction as early as with gathers",
    ),
    (
        lambda case: case.layout[3] == 8 and case.chunked_loss,
        0.08,
        "tp 8 and a loss in chunks: sums over tp that a chunk's small products don't hide",
    ),
)
"""(whether it is so, the most that they may be apart, why)."""
BF16 = p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


NO_HOOKS = stack_of("parallel3d").with_values(
    "parallel3d, of which a dry run knows",
    {"host_unit": 0.0, "host_tp": 0.0, "straggler": 0.0},
    "not played",
)


@dataclass(frozen=True)
class Case:
    """What is trained, on which layout and machine; names as in ``Workload``."""

    model: str
    layout: tuple[int, int, int, int]
    machine: str
    checkpointing: str = "none"
    micro_batch: int = 1
    accumulation: int = 1
    sequence_parallel: bool = True
    reshard_after_forward: bool = True
    chunked_loss: bool = False
    cp_attention: str = "ulysses"
    hfsdp: bool = False

    def __str__(self) -> str:
        replicate, shard, cp, tp = self.layout
        said = {
            "no sequence parallel": tp > 1 and not self.sequence_parallel,
            "keep": not self.reshard_after_forward and shard * cp > 1,
            "chunked loss": self.chunked_loss,
            "HFSDP": self.hfsdp and replicate > 1,
            self.cp_attention: cp > 1,
        }
        words = [self.model, f"{replicate}x{shard}x{cp}x{tp}", self.machine, self.checkpointing]
        words.append(f"{self.micro_batch} x {self.accumulation}")
        return ", ".join([*words, *(word for word, is_so in said.items() if is_so)])

    @property
    def mesh(self) -> p3d.MeshLayout:
        replicate, shard, cp, tp = self.layout
        return p3d.MeshLayout(replicate, shard, tp, cp=cp)

    @property
    def plan(self) -> dict[str, Any]:
        return LLAMA_SEQUENCE_PLAN if self.sequence_parallel else LLAMA_TP_PLAN

    @property
    def cluster(self) -> Cluster:
        world, (gpu, nic) = self.mesh.world_size, MACHINES[self.machine]
        node = max(n for n in range(1, 9) if world % n == 0)
        return Cluster.of(gpu, world // node, node, nic)


def cases() -> Iterator[Case]:
    """Six of each layout: the settings take turns, in cycles of different lengths."""
    models, machines, kinds = map(cycle, (tuple(MODELS), tuple(MACHINES), tuple(KINDS)))
    attention, batches = (
        cycle(("ulysses", "gather", "ring")),
        cycle(((1, 1), (2, 1), (1, 2), (1, 1), (1, 3))),
    )
    sequence, keep, chunked = cycle((1, 1, 0)), cycle((0, 0, 0, 1)), cycle((0, 1, 0, 0, 1, 0, 0))
    hfsdp = cycle((0, 1, 0, 0, 1))
    for turn in range(6):
        for layout in LAYOUTS:
            micro, accumulation = next(batches)
            yield Case(
                *(next(models), layout, next(machines), next(kinds), micro, accumulation),
                bool(next(sequence)),
                not next(keep),
                bool(next(chunked)),
                next(attention),
                layout[0] > 1 and bool(next(hfsdp)),
            )
        for each in (models, machines, kinds, attention, batches)[: turn % 5 + 1]:
            next(each)  # another pairing in the next round


def allowed(case: Case) -> float:
    """How far apart the two may be: 5 %, or more for a reason."""
    return next((most for is_so, most, _ in REASONS if is_so(case)), LIMIT)


def train(case: Case) -> None:
    """Two steps."""
    config, mesh = MODELS[case.model], p3d.build_mesh(case.mesh, device_type="cpu")
    with torch.device("meta"):
        model: Any = Llama(config)
    example: Any = (torch.ones(2, 16, dtype=torch.long), torch.arange(16).expand(2, -1)), {}
    is_cut = case.mesh.cp > 1
    p3d.parallelize(
        model,
        mesh,
        tp_plan=case.plan,
        mp_policy=BF16,
        reshard_after_forward=case.reshard_after_forward,
        activation_checkpointing=KINDS[case.checkpointing],
        loss_parallel="chunked" if case.chunked_loss else True,
        shard_optimizer_over_replicate=case.hfsdp,
        context_parallel=case.cp_attention if is_cut else None,
        example=example if is_cut else None,
    )
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    places = torch.arange(config.max_seq_len).expand(case.micro_batch, -1).contiguous()
    ids = torch.zeros_like(places)
    for _ in range(2):
        for number in range(case.accumulation):
            model.set_requires_all_reduce(number == case.accumulation - 1)
            given = ids, ids.clone(), places
            if is_cut:
                given = p3d.cp.shard_batch(given, mesh)
            logits = model(given[0], given[2]).flatten(0, 1)
            loss = F.cross_entropy(
                logits if case.chunked_loss else logits.float(), given[1].flatten()
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(case: Case) -> DryRun:
    """The dry run of the rank in the middle, whose groups lie on several nodes if any do."""
    node = case.cluster.gpus_per_node
    world = case.mesh.world_size
    return record(lambda: train(case), world, world // 2, gpus_per_node=node)


@lru_cache
def spec_of(model: str, sequence_parallel: bool) -> ModelSpec:
    """The planner's view of the model."""
    with torch.device("meta"):
        made = Llama(MODELS[model])
    plan = LLAMA_SEQUENCE_PLAN if sequence_parallel else LLAMA_TP_PLAN
    return spec_from_module(made, tp_plan=plan, seq_len=MODELS[model].max_seq_len)


def predicted(case: Case) -> Prediction:
    """The planner's prediction."""
    work = Workload(
        seq_len=MODELS[case.model].max_seq_len,
        micro_batch=case.micro_batch,
        global_batch=case.micro_batch * case.accumulation * case.mesh.data_size,
        checkpointing=case.checkpointing,
        sequence_parallel=case.sequence_parallel,
        reshard_after_forward=case.reshard_after_forward,
        chunked_loss=case.chunked_loss,
        shard_optimizer_over_replicate=case.hfsdp,
        cp_attention=case.cp_attention,
        stack=NO_HOOKS,
    )
    return predict(spec_of(case.model, case.sequence_parallel), case.mesh, case.cluster, work)


@dataclass(frozen=True)
class Found:
    """Seconds of a step: as played, and as predicted without what only ``predict`` has."""

    case: Case
    played: float
    predicted: float

    @property
    def apart(self) -> float:
        """By which part the prediction is longer."""
        return self.predicted / self.played - 1


def compare(case: Case) -> Found:
    """Records, plays and predicts."""
    played = timeline(recorded(case), case.cluster).step_seconds
    return Found(case, played, predicted(case).step_seconds)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    given = parser.parse_args()
    found = []
    for case in cases():
        if given.only in str(case):
            found.append(compare(case))
            print(f"{found[-1].apart:+7.1%}  {case}", flush=True)
    apart = sorted(abs(each.apart) for each in found)
    beyond = [each for each in found if abs(each.apart) > LIMIT]
    unexplained = [each for each in found if abs(each.apart) > allowed(each.case)]
    rows = [
        [str(f.case), f"{f.played * 1e3:.2f}", f"{f.predicted * 1e3:.2f}", f"{f.apart:+.1%}"]
        for f in beyond
    ]
    if rows:
        print_table("more than 5 % apart", ["case", "played, ms", "predicted", "apart"], rows)
    middle, high = apart[len(apart) // 2], apart[len(apart) * 9 // 10]
    print(
        f"\n{len(found)} layouts: median {middle:.1%}, 90th percentile {high:.1%}, most {apart[-1]:.1%}; "
    )
    print(
        f"{len(found) - len(beyond)} within 5 %; {len(beyond) - len(unexplained)} beyond for a known reason:"
    )
    for _, most, why in REASONS:
        print(f"  up to {most:.0%}: {why}")
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
