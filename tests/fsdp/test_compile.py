"""torch.compile of units: by parallelize, by the user before or after fully_shard, around the whole model.

A unit's forward is one graph, compiled once for all units of a class; the engine's hooks are in none. The
compiled model computes what the same model does without compile.
"""

from dataclasses import dataclass

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from _support.models import LM_PLAN, Block, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d import parallelize
from parallel3d._torch.autograd import untraced
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """Who compiles what.

    Attributes:
        how: "parallelize", "before" or "after" fully_shard by the user, "wrapped" by ``torch.compile(block)``
            before it, or "whole" (the wrapped model).
    """

    how: str
    backend: str = "aot_eager"
    checkpointing: bool = False
    tp: int = 1
    bf16: bool = False

    def build(self, mesh: DeviceMesh, *, compiled: bool) -> nn.Module:
        """The model in this case, or its twin without compile."""
        torch.manual_seed(0)
        quick = self.backend == "inductor" and self.tp == 1
        model = small() if quick else Lm(layers=3)
        model.to(torch.float32 if self.bf16 else torch.float64)
        policy = BF16 if self.bf16 else MixedPrecisionPolicy()
        if self.how == "parallelize" or self.checkpointing or self.tp > 1:
            parallelize(
                model,
                mesh,
                LM_PLAN if self.tp > 1 else None,
                mp_policy=policy,
                activation_checkpointing=self.checkpointing,
                compile=self.backend if compiled and self.how == "parallelize" else False,
            )
        else:
            self._wrap_by_hand(model, mesh, policy, compiled=compiled)
        if self.how == "whole" and compiled:
            model.compile(backend=self.backend)
        return model

    def _wrap_by_hand(
        self, model: Lm, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, compiled: bool
    ) -> None:
        options = {"backend": self.backend, "fullgraph": True}  # as torchtitan does
        for i, block in enumerate(model.layers):
            if compiled and self.how == "before":
                block.compile(**options)
            if compiled and self.how == "wrapped":
                block = model.layers[i] = torch.compile(block, **options)
            fully_shard(block, mesh=mesh, mp_policy=policy)
            if compiled and self.how == "after":
                block.compile(**options)
        fully_shard(model, mesh=mesh, mp_policy=policy)


class SmallBlock(Block):
    """One kernel each way: inductor compiles it in seconds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(F.linear(x, self.up.weight))


def small() -> Lm:
    model = Lm(dim=6, hidden=6, layers=2)
    model.layers = nn.ModuleList(SmallBlock(6, 6) for _ in range(2))
    return model


def train(models: list[nn.Module], step: int, sample: int) -> list[list[torch.Tensor]]:
    """One SGD step of each model; their losses and gradients' shards."""
    results = []
    for model in models:
        loss = lm_loss(model, tokens(10 * step + sample))
        loss.backward()
        grads = [get_local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        results.append([loss.detach(), *(g.clone() for g in grads)])
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    get_local_tensor(p).sub_(get_local_tensor(p.grad), alpha=0.1)
        model.zero_grad()
    return results


def compare(case: Case) -> None:
    """Runs on every rank: three steps and evaluations beside the model without compile."""
    torch._dynamo.reset()
    counters.clear()
    # No vector instructions: looking for them compiles programs, and takes longer than all the rest.
    torch._inductor.config.cpp.vec_isa_ok = False
    torch._inductor.config.compile_threads = 1
    tolerance = 0.0 if case.backend == "aot_eager" else 1e-12
    mesh = cpu_mesh(1, 2, case.tp)
    models = [case.build(mesh, compiled=compiled) for compiled in (True, False)]

    def same(pairs: list[list[torch.Tensor]]) -> None:
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    def check_graphs(count: int) -> None:
        """One for all blocks in each mode; the whole model also has what is outside the blocks."""
        found = counters["stats"]["unique_graphs"]
        assert found == count or (case.how == "whole" and found > count)

    same(train(models, 0, dist.get_rank() // case.tp))
    check_graphs(1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (1, 2):
            same(train(models, step, dist.get_rank() // case.tp))
    for count, mode in ((2, torch.no_grad), (3, torch.inference_mode)):
        with mode():
            for model in models:
                model.eval()
            same([[model(tokens(7))] for model in models])
            check_graphs(count)
            with torch._dynamo.config.patch(error_on_recompile=True):
                same([[model(tokens(8))] for model in models])
    for model in models:
        model.train()
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(train(models, 3, dist.get_rank() // case.tp))
    if case.how != "whole":
        assert not counters["graph_break"], counters["graph_break"]
    torch._dynamo.reset()


CASES = [
    pytest.param(Case("parallelize"), marks=pytest.mark.slow),
    pytest.param(Case("parallelize", checkpointing=True, tp=2, bf16=True), marks=pytest.mark.slow),
    pytest.param(Case("whole"), marks=pytest.mark.slow),
    pytest.param(Case("wrapped"), marks=pytest.mark.slow),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            Case("before"),
            Case("after"),
            Case("parallelize", bf16=True),
            Case("parallelize", checkpointing=True),
            Case("before", bf16=True),
            Case("whole", checkpointing=True, bf16=True),
            Case("whole", tp=2),
        )
    ),
]


@pytest.mark.parity("behaviour: torch.compile per unit, aot_eager")
@pytest.mark.parity("behaviour: torch.compile around fully_shard")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_equals_eager(gloo_pool, case: Case) -> None:
    gloo_pool.run(compare, case, world_size=2 * case.tp)


@pytest.mark.slow
@pytest.mark.parity("behaviour: torch.compile per unit, inductor")
@pytest.mark.parametrize(
    "case",
    [
        Case("parallelize", "inductor"),
        pytest.param(Case("parallelize", "inductor", True, 2), marks=pytest.mark.full),
        pytest.param(Case("before", "inductor"), marks=pytest.mark.full),
        pytest.param(Case("whole", "inductor"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_inductor_equals_eager(gloo_pool, case: Case) -> None:
    gloo_pool.run(compare, case, world_size=2 * case.tp)


def test_untraced() -> None:
    """The mark keeps a function and what it calls out of graphs, and is no wrapper."""
    seen: list[bool] = []

    def called(x: torch.Tensor) -> None:
        seen.append(isinstance(x + 1, torch.Tensor) and not torch.compiler.is_compiling())

    def hook(x: torch.Tensor) -> None:
        called(x)

    assert untraced(hook) is hook

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        hook(y)
        return y * 3

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(program, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 6.0))
    assert seen == [True] * 3
    assert counters["stats"]["unique_graphs"] == 2  # before the hook and after it
