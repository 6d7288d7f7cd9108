"""Questions that users ask ``plan``, its answers, and the layouts that experts publish for the same.

python benchmarks/planner_questions.py          # prints the table
python benchmarks/planner_questions.py --docs   # also writes it into docs/planner.md

Each layout of an expert is predicted by the same model as ours, in bf16 and with the same kernels: with its
micro-batch, recomputation and pipeline where they are published, else with those that rank first; then once
more with the constants of the expert's software.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tables import replace_between, table

from parallel3d.mesh import MeshLayout
from parallel3d.planner import (
    Cluster,
    MeshPlan,
    Pipeline,
    Prediction,
    Workload,
    compare_pipelines,
    plan,
    predict,
    spec_from_hf_config,
)
from parallel3d.planner.comparison import NEMO
from parallel3d.planner.pipeline import NO_PIPELINE
from parallel3d.planner.planning import setting, short, time_groups

DOCS = Path(__file__).parents[1] / "docs"
_GIB = 2**30
_STEP = 2**22  # tokens, as ``parallel3d plan`` takes without --global-batch


@dataclass(frozen=True)
class Expert:
    """What somebody publishes.

    Attributes:
        layout: of one stage, if there is a pipeline.
        micro_batch, checkpointing: as published; None: what ranks first of this layout.
        stack: the software, by its name in stacks.toml.
        measured: tokens/s/GPU that they publish, and for what.
    """

    who: str
    url: str
    layout: MeshLayout
    micro_batch: int | None = None
    checkpointing: str | None = None
    pipeline: Pipeline = NO_PIPELINE
    stack: str = NEMO
    compile: bool = False
    measured: str = ""


@dataclass(frozen=True)
class Question:
    """A model, machines and a length of sequences, with steps of 4M tokens."""

    model: str
    gpu: str
    nodes: int
    seq_len: int
    experts: tuple[Expert, ...]

    @property
    def text(self) -> str:
        gpus = 8 * self.nodes
        return f"{self.model}, {gpus} {self.gpu}, {self.seq_len // 1024}k tokens"

    def answer(self) -> MeshPlan:
        """The plan, as the command line asks for it."""
        work = Workload(self.seq_len, global_batch=_STEP // self.seq_len)
        cluster = Cluster.of(self.gpu, self.nodes)
        return plan(
            spec_from_hf_config(self.model), cluster, work, reshard_after_forward=(True, False)
        )


_TITAN = (
    "https://github.com/pytorch/torchtitan/blob/01424cb25/torchtitan/models/llama3/train_configs"
)
_BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df/docs/performance-summary-archive.md"
_RECIPES = "https://docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge/bridge.perf_recipes.llama.h100.llama31.html"
_DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd/llama3.1/README_70b.md"
_FLOAT8 = "https://github.com/pytorch/pytorch.github.io/blob/1580429b6/_posts/2024-11-25-training-using-float8-fsdp2.md"
_MIXTRAL = "https://github.com/NVIDIA/Megatron-LM/blob/07d71d2cdf/examples/mixtral/README.md"
_XTUNER = (
    "https://github.com/InternLM/xtuner/blob/b934f4620/docs/zh_cn/legacy/acceleration/benchmark.rst"
)


def titan(name: str, layout: MeshLayout, micro_batch: int, kind: str) -> Expert:
    url = f"{_TITAN}/llama3_{name}.toml"
    return Expert("torchtitan", url, layout, micro_batch, kind, stack="fsdp2-2025")


def ibm(layout: MeshLayout, measured: str) -> Expert:
    stack = "fsdp2-2024"
    return Expert("IBM and Meta", _FLOAT8, layout, measured=measured, stack=stack, compile=True)


def nvidia(url: str, layout: MeshLayout, pipeline: Pipeline, measured: str = "") -> Expert:
    return Expert("NVIDIA", url, layout, 1, "none", pipeline, measured=measured)


QUESTIONS = (
    Question(
        *("llama-3.1-8b", "h100", 1, 8192),
        (
            titan("8b", MeshLayout(1, 8, 1), 1, "selective"),
            ibm(MeshLayout(1, 8, 1), "8,000 (compiled, 128 or more)"),
        ),
    ),
    Question(
        *("llama-3.1-70b", "h100", 8, 8192),
        (
            titan("70b", MeshLayout(1, 8, 8), 8, "full"),
            ibm(MeshLayout(1, 64, 1), "960 (compiled, 512)"),
            nvidia(_DGXC, MeshLayout(2, 1, 4, cp=2), Pipeline(4, "interleaved", 5), "1,113"),
        ),
    ),
    Question(
        *("llama-3.1-70b", "h100", 8, 131072),
        (
            Expert(
                *("XTuner", _XTUNER, MeshLayout(1, 8, 1, cp=8), 1, "full"),
                stack="pytorch",
                measured="145 (32 A100, shard 4)",
            ),
        ),
    ),
    Question(
        *("mixtral-8x7b", "a100-80gb-sxm", 4, 4096),
        (
            Expert("ep 8 without pp", _MIXTRAL, MeshLayout(1, 32, 1, ep=8), 1),
            nvidia(_MIXTRAL, MeshLayout(1, 8, 1, ep=8), Pipeline(4)),
        ),
    ),
    Question(
        *("qwen3-30b-a3b", "h200", 2, 4096),
        (
            Expert(
                *("NVIDIA", _BRIDGE, MeshLayout(1, 16, 1, ep=16), 1),
                measured="8,960 (float8, H100)",
            ),
            Expert("ep in a node", _BRIDGE, MeshLayout(1, 16, 1, ep=8), 2),
        ),
    ),
    Question(
        *("llama-3.1-405b", "h100", 64, 8192),
        (
            ibm(MeshLayout(1, 128, 4), "152 (compiled)"),
            titan("405b", MeshLayout(1, 64, 8), 2, "full"),
            nvidia(_RECIPES, MeshLayout(4, 1, 8, cp=2), Pipeline(8, "interleaved", 8)),
        ),
    ),
)


def of_expert(answer: MeshPlan, expert: Expert) -> Prediction:
    """The expert's layout, with the settings that are published; of the others those that rank first."""
    kind, size = expert.checkpointing, expert.micro_batch
    if expert.pipeline.stages > 1:
        work = replace(answer.workload, sharding="zero1", reduce_dtype="bf16", fused_loss=True)
        work = replace(work, micro_batch=size, checkpointing=kind or "none")
        return predict(answer.model, expert.layout, answer.cluster, work, expert.pipeline)
    same = [
        each
        for each in answer.candidates
        if each.layout == expert.layout
        and size in (None, each.micro_batch)
        and kind in (None, each.workload.checkpointing)
    ]
    return same[0] if same else answer.of(expert.layout)


def in_their_software(each: Prediction, expert: Expert) -> float:
    """tokens/s/GPU of the same with the constants of the expert's stack."""
    work = replace(each.workload, micro_batch=each.micro_batch, stack=expert.stack)
    work = replace(work, compile=expert.compile)
    found = predict(each.model, each.layout, each.cluster, work, each.pipeline)
    return found.tokens_per_second_per_gpu


def why(ours: Prediction, theirs: Prediction, most: int = 2) -> str:
    """Where the largest differences in time are, microseconds a token and GPU: theirs - ours."""
    each = [
        {name: seconds / p.tokens_per_gpu * 1e6 for name, seconds in time_groups(p).items()}
        for p in (ours, theirs)
    ]
    more = {
        name: each[1].get(name, 0.0) - each[0].get(name, 0.0) for name in {**each[0], **each[1]}
    }
    largest = sorted(more, key=lambda name: -abs(more[name]))[:most]
    return ", ".join(f"{name} {more[name]:+,.1f}" for name in largest if abs(more[name]) >= 0.05)


def row_of(first: list[str], each: Prediction, answer: MeshPlan, more: list[str]) -> list[str]:
    """A layout: what it is, where it ranks, and what is predicted of it."""
    places, best = [p.layout for p in answer.layouts], answer.best
    place = str(places.index(each.layout) + 1) if each.layout in places else "refused"
    stages = (
        f", pp {each.pipeline.chunks}/{each.pipeline.stages}" if each.pipeline.stages > 1 else ""
    )
    return [
        *first,
        f"{short(each)}{stages}",
        f"{each.micro_batch}, {setting(each)}",
        "" if stages else place,
        f"{each.tokens_per_second_per_gpu:,.0f}",
        f"{each.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu:.2f}",
        f"{each.memory.part():.0%}, {each.fits_probability:.0%}",
        *more,
    ]


def rows_of(question: Question) -> Iterator[list[str]]:
    """Our answer, the best pipeline, then the experts' layouts."""
    answer = question.answer()
    best = answer.best
    yield row_of([f"**{question.text}**", "`plan`"], best, answer, ["", "", ""])
    pipelines = compare_pipelines(answer)
    if pipelines is not None and pipelines.alike is not None:
        theirs = f"{pipelines.pipeline.tokens_per_second_per_gpu:,.0f}"
        reason = why(best, pipelines.alike)
        yield row_of(["", "`plan`, a pipeline"], pipelines.alike, answer, [theirs, reason, ""])
    for expert in question.experts:
        each = of_expert(answer, expert)
        more = [f"{in_their_software(each, expert):,.0f}", why(best, each), expert.measured]
        yield row_of(["", f"[{expert.who}]({expert.url})"], each, answer, more)


def main() -> None:
    """Prints the table, and writes it into the page."""
    head = ["", "whose", "replicate x shard x tp", "micro-batch, recomputation", "place"]
    head += ["tokens/s/GPU", "of ours", "of the memory, to fit", "in their software"]
    head += ["theirs - ours, us a token", "published"]
    text = table(head, [row for question in QUESTIONS for row in rows_of(question)])
    print(text)
    if "--docs" in sys.argv[1:]:
        page = DOCS / "planner.md"
        page.write_text(replace_between(page.read_text(), "questions", text))


if __name__ == "__main__":
    main()
