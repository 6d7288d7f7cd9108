"""Dry runs made by hand: a Llama-like step as the engine runs it, and what can be changed in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from parallel3d._util.recorder import Collective
from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.result import (
    DryRun,
    LiveTensor,
    MemorySample,
    Operation,
    ParameterPlacement,
    Peak,
    UnknownRead,
)

WORD = 2  # bytes of bf16


@dataclass
class Program:
    """What is written down of a rank while it runs; ``made`` gives the dry run."""

    layout: MeshLayout
    rank: int = 0
    gpus_per_node: int = 8
    step: int = 0
    phase: str = "forward"
    module: str = ""
    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axis_ranks = {
            axis: next(group for group in self.layout.groups(axis) if self.rank in group)
            for axis in ("replicate", "shard", "tp")
        }

    def matmul(self, m: int, n: int, k: int, dtype: str = "bfloat16") -> None:
        moved = (m * n + n * k + m * k) * WORD
        self._add("matmul", "mm", flops=2.0 * m * n * k, moved=moved, sizes=(m, n, k), dtype=dtype)

    def attention(self, flops: float, moved: int) -> None:
        self._add("attention", "sdpa", flops=flops, moved=moved, dtype="bfloat16")

    def elementwise(self, moved: int, name: str = "mul", **more: Any) -> None:
        self._add("elementwise", name, moved=moved, dtype="bfloat16", **more)

    def issue(
        self,
        op: str,
        axis: str | None,
        size: int,
        unit: str = "",
        asynchronous: bool = True,
        dtype: str = "bfloat16",
        group_size: int | None = None,
        **more: Any,
    ) -> int | None:
        """Its index; on an axis of one rank there is none."""
        ranks = group_size or (len(self.axis_ranks[axis]) if axis else self.layout.world_size)
        if ranks == 1:
            return None
        index = len(self.collectives)
        self.collectives.append(Collective(index, op, axis, unit, size, ranks, asynchronous))
        self._add("collective", op, collective=index, dtype=dtype, **more)
        return index

    def wait(self, index: int | None, **more: Any) -> None:
        if index is not None:
            self._add("wait", "wait", collective=index, **more)

    def hold(self, kind: str, more: int) -> None:
        self.held[kind] = self.held.get(kind, 0) + more
        now = {name: size for name, size in self.held.items() if size}
        self.memory.append(MemorySample(len(self.operations), now))

    def _add(self, kind: str, name: str, **more: Any) -> None:
        self.operations.append(Operation(kind, name, self.module, self.phase, self.step, **more))

    def made(self, **more: Any) -> DryRun:
        # A sample counts from the operation after it was taken; the last ones have none.
        last = len(self.operations) - 1
        memory = [replace(s, operation=min(s.operation, last)) for s in self.memory]
        top = max(memory, key=lambda sample: sample.total, default=MemorySample(0, {}))
        at = self.operations[top.operation]
        largest = [
            LiveTensor(kind, size, (size // WORD,), "bfloat16", f"layers.0.{kind}", "mm")
            for kind, size in sorted(top.by_kind.items(), key=lambda item: -item[1])
        ]
        values: dict[str, Any] = {
            "rank": self.rank,
            "world_size": self.layout.world_size,
            "mesh": {axis: len(ranks) for axis, ranks in self.axis_ranks.items()},
            "axis_ranks": self.axis_ranks,
            "gpus_per_node": self.gpus_per_node,
            "steps": self.step,
            "collectives": tuple(self.collectives),
            "operations": tuple(self.operations),
            "memory": tuple(memory),
            "peak": Peak(
                top.operation,
                top.total,
                dict(top.by_kind),
                at.phase,
                at.module,
                at.name,
                tuple(largest),
            ),
            "parameters": (),
            "unknown": (UnknownRead("train.py:12, in main", "item", 2),),
            "seconds": 1.5,
        }
        return DryRun(**{**values, **more})


@dataclass
class Llama:
    """A step of a Llama; ``before`` is called ahead of each block's forward, to change what happens there."""

    layers: int = 3
    hidden: int = 4096
    ffn: int = 14336
    vocab: int = 128256
    tokens: int = 8192
    prefetch: bool = True
    checkpointing: bool = False
    steps: int = 2
    reduce_dtype: str = "float32"
    skip: tuple[int, ...] = ()
    before: Callable[[Program, int], None] = lambda program, layer: None

    def run(self, layout: MeshLayout, rank: int = 0, gpus_per_node: int = 8, **more: Any) -> DryRun:
        return self.program(layout, rank, gpus_per_node).made(
            parameters=self.parameters(layout), **more
        )

    def program(self, layout: MeshLayout, rank: int = 0, gpus_per_node: int = 8) -> Program:
        program = Program(layout, rank, gpus_per_node)
        state = self.numel * 12 // (layout.shard * layout.tp)
        program.hold("parameters", state // 3)
        for _ in range(self.steps):
            self._forward(program)
            self._backward(program)
            self._optimizer(program, state)
        return program

    @property
    def block(self) -> int:
        """Elements of one block."""
        return self.hidden * self.hidden * 5 // 2 + 3 * self.hidden * self.ffn

    @property
    def numel(self) -> int:
        return self.layers * self.block + 2 * self.vocab * self.hidden

    def parameters(self, layout: MeshLayout) -> tuple[ParameterPlacement, ...]:
        found = []
        for layer in range(self.layers):
            for name in ("attention.wq", "feed_forward.w1"):
                rows = self.hidden if "wq" in name else self.ffn
                local = rows // layout.shard // layout.tp
                found.append(
                    ParameterPlacement(
                        f"layers.{layer}.{name}.weight",
                        (rows, self.hidden),
                        (local, self.hidden),
                        "float32",
                        {"replicate": "R", "shard": "S(0)", "tp": "S(0)"},
                        local * self.hidden * 4,
                        True,
                    )
                )
        return tuple(found)

    def _gather(self, program: Program, layer: int) -> int | None:
        kept = layer == self.layers - 1 and program.phase == "backward"  # from its forward
        if layer in self.skip or kept:
            return None
        size = self.block * WORD // program.layout.tp
        program.hold("unsharded parameters", size)
        return program.issue("all_gather", "shard", size, f"layers.{layer}")

    def _free(self, program: Program) -> None:
        program.hold("unsharded parameters", -self.block * WORD // program.layout.tp)

    def _blocks(self, program: Program, order: list[int], work: Callable[[int], None]) -> None:
        ahead = self._gather(program, order[0]) if self.prefetch else None
        for place, layer in enumerate(order):
            program.module = f"layers.{layer}"
            now = ahead if self.prefetch else self._gather(program, layer)
            program.wait(now)
            if self.prefetch and place + 1 < len(order):
                ahead = self._gather(program, order[place + 1])
            work(layer)
        program.module = ""

    def _compute(self, program: Program, layer: int, times: int) -> None:
        tp, size = program.layout.tp, self.tokens * self.hidden
        program.module = f"layers.{layer}.attention"
        for _ in range(times):
            program.elementwise(4 * size)
            program.matmul(self.tokens, self.hidden * 3 // 2 // tp, self.hidden)
            program.attention(2.0 * self.tokens * self.tokens * self.hidden / tp, 4 * size // tp)
            program.matmul(self.tokens, self.hidden, self.hidden // tp)
        program.issue("all_reduce", "tp", size * WORD, asynchronous=False)
        program.module = f"layers.{layer}.feed_forward"
        for _ in range(times):
            program.matmul(self.tokens, 2 * self.ffn // tp, self.hidden)
            program.elementwise(6 * self.tokens * self.ffn // tp)
            program.matmul(self.tokens, self.hidden, self.ffn // tp)
        program.issue("all_reduce", "tp", size * WORD, asynchronous=False)
        program.module = f"layers.{layer}"

    def _forward(self, program: Program) -> None:
        program.phase = "forward"

        def work(layer: int) -> None:
            self.before(program, layer)
            if layer in self.skip:
                return
            self._compute(program, layer, 1)
            kept = 4 if self.checkpointing else 64
            program.hold("activations", self.tokens * self.hidden * kept // program.layout.tp)
            if layer < self.layers - 1:
                self._free(program)

        self._blocks(program, list(range(self.layers)), work)
        program.module = "output"
        program.matmul(self.tokens, self.vocab // program.layout.tp, self.hidden)

    def _backward(self, program: Program) -> None:
        program.phase = "backward"
        reducing: list[int | None] = []

        def work(layer: int) -> None:
            if layer in self.skip:
                return
            self._compute(program, layer, 3 if self.checkpointing else 2)
            kept = 4 if self.checkpointing else 64
            program.hold("activations", -self.tokens * self.hidden * kept // program.layout.tp)
            while reducing:
                program.wait(reducing.pop())
            self._free(program)
            reducing.extend(self._reduce(program, f"layers.{layer}"))

        self._blocks(program, list(range(self.layers))[::-1], work)
        while reducing:
            program.wait(reducing.pop())

    def _reduce(self, program: Program, unit: str) -> list[int | None]:
        whole = self.block * (4 if self.reduce_dtype == "float32" else 2) // program.layout.tp
        mine = whole // program.layout.shard
        each = [
            program.issue("reduce_scatter", "shard", whole, unit, dtype=self.reduce_dtype),
            program.issue("all_reduce", "replicate", mine, unit, dtype=self.reduce_dtype),
        ]
        return [index for index in each if index is not None]

    def _optimizer(self, program: Program, state: int) -> None:
        program.phase = "optimizer"
        if program.step == 0:
            program.hold("optimizer state", state * 2 // 3)
        program.issue("all_reduce", None, 4, asynchronous=False, dtype="float32")
        program.elementwise(state, "_fused_adamw_")
        program.step += 1
