"""What the host does for a unit on an accelerator: kernels, events, waits, works; and what CUDA fuses."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.fsdp.host_counts import Counted, CountedStreams, counted, is_fused, on_streams
from _support.host_table import CASES, Case, of_unit, table, written
from torch import nn
from torch.distributed.tensor import Shard

import parallel3d as p3d
from parallel3d._torch import groups
from parallel3d.fsdp import collectives, fully_shard
from parallel3d.testing import fake_world, record_collectives

TP_ALONE = Case("TP alone", (1, 1, 2))


QUICK = ("FSDP, bf16/fp32", "HSDP, bf16/fp32", "FSDP + TP, fp32")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * (str(c) not in QUICK)) for c in CASES],
)
def test_of_a_unit(case: Case) -> None:
    ours = of_unit(case, "ours")
    layers = of_unit(TP_ALONE, "ours")["kernels"] if case.mesh[2] > 1 else 0
    replicates = case.mesh[0] > 1
    assert ours["kernels"] - layers <= 5
    assert ours["asynchronous"] == 0
    assert ours["events"] <= 6 and ours["waits"] <= 6 + replicates
    assert ours["stream changes"] <= 6 + 2 * replicates
    assert ours["current stream"] <= 3  # forward, backward, reduction
    assert ours["allocations"] <= 10


@pytest.mark.parametrize(
    ("case", "calls"), [(Case("replicate only", (4, 1, 1)), 190), (TP_ALONE, 470)], ids=str
)
def test_of_a_unit_that_is_not_sharded(case: Case, calls: int) -> None:
    """It asks nothing of streams, as the root's units are reduced together; most of TP's calls are c10d's."""
    ours = of_unit(case, "ours")
    on_streams = ("asynchronous", "events", "waits", "stream changes", "current stream")
    assert not any(ours[what] for what in on_streams)
    assert ours["kernels"] - 4 * (case.mesh[2] > 1) == 1
    assert ours["Python calls"] <= calls


@pytest.mark.slow(every=True)
def test_table_is_up_to_date() -> None:
    """Ours are nowhere above torch's. The page is of torch 2.13 and Python 3.11, whose calls it counts."""
    for case in CASES:
        ours, torchs = of_unit(case, "ours"), of_unit(case, "torch")
        assert all(ours[what] <= torchs[what] for what in ours), case
    now, page = ([line.split("|") for line in text.splitlines()] for text in (table(), written()))
    assert [line[1:-2] for line in page if "torch |" not in line] == [
        line[1:-2] for line in now if "torch |" not in line
    ], "run python tests/_support/host_table.py"
    if torch.__version__.startswith("2.13"):
        assert [line[1:-2] for line in page] == [line[1:-2] for line in now]


# ---- operations on lists of tensors that CUDA runs as one kernel ----


class Net(nn.Module):
    """Uneven rows, and a part that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 9), nn.Linear(9, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


class Rows:
    """A custom all-gather, which gathers rows of all parameters."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        assert not async_op  # on the engine's own stream
        return groups.all_gather_single(output_tensor, input_tensor, group=group)


def sharded(*sizes: int, frozen: bool = False, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        mesh = p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")
        model = nn.Sequential(Net(), Net())
        for net in model:
            net.first.weight.requires_grad_(not frozen)
            fully_shard(net, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return make


def by_custom_gathers() -> nn.Module:
    model = sharded(1, 4, 1)()
    for net in model:
        net.set_custom_all_gather(Rows())
    return model


def with_hfsdp() -> nn.Module:
    mesh = p3d.build_mesh(p3d.MeshLayout(4, 1, 1), device_type="cpu")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return p3d.parallelize(model, mesh, shard_optimizer_over_replicate=True)


def seen_in(make: Callable[[], nn.Module]) -> set[tuple[str, bool]]:
    with fake_world(0, 4):
        return set(counted(make, torch.randn(4, 8), CountedStreams())[1])


COPY, CAT = ("split_with_sizes_copy", True), ("_chunk_cat", True)
MIXED = p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(sharded(1, 4, 1), {COPY}, id="uneven rows"),
        pytest.param(sharded(2, 2, 1, mp_policy=MIXED), {COPY}, id="HSDP, mixed, uneven rows"),
        pytest.param(sharded(1, 4, 1, frozen=True), {COPY}, id="two buckets in one gather"),
        pytest.param(by_custom_gathers, {COPY}, id="a custom gather"),
        pytest.param(with_hfsdp, {COPY}, id="HFSDP over replicate alone"),
    ],
)
def test_what_is_gathered_is_copied_by_one_kernel(make: Any, expected: set) -> None:
    found = seen_in(make)
    assert expected <= found
    assert all(fused for _, fused in found), found


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            sharded(1, 4, 1, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None),
            id="another dim",
        ),
        pytest.param(sharded(1, 4, 1, reshard_after_forward=2), id="a part is kept"),
    ],
)
def test_where_it_is_a_kernel_for_each(make: Any) -> None:
    """The page says so; one that is fused by now should be taken from it."""
    assert ("_foreach_copy_", False) in seen_in(make)


def test_replicated_gradients_norms_and_steps_are_fused() -> None:
    """What the gradients of replicated units, a norm, a clip, an average and an optimizer call, but for one:
    the numbers of steps that ``optimizer.state`` shows are copied bucket by bucket."""
    streams = CountedStreams()
    with fake_world(0, 4), on_streams(streams):
        model = sharded(4, 1, 1)()
        average = p3d.optim.EMA(model, decay=0.9)
        optimizer = p3d.optim.local(torch.optim.AdamW, model.parameters(), foreach=True)
        with Counted() as seen:
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
                p3d.optim.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                average.update()
                optimizer.zero_grad()
    names = {name for name, _ in seen.lists}
    assert {"_foreach_copy_", "_foreach_norm", "_foreach_mul_", "_foreach_lerp_"} <= names
    assert [name for name, fused in seen.lists if not fused] == [
        "_foreach_copy_"
    ] * 2  # a step each


def test_what_is_fused() -> None:
    a, b, flat = torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(4, 12)
    copies = lambda *pair: is_fused("_foreach_copy_", ([pair[0]], [pair[1]]), {})  # noqa: E731
    assert copies(a, a.bfloat16()) and not copies(a, b) and not copies(a, flat[:, :6])
    splits = lambda *out: is_fused("split_with_sizes_copy", (flat, [6, 6], 1), {"out": out})  # noqa: E731
    assert splits(a, a.clone()) and not splits(a, flat[:, :6]) and not splits(a, a.bfloat16())
    cats = lambda *given, out=flat: is_fused("_chunk_cat", (given,), {"out": out})  # noqa: E731
    assert cats(a, a) and cats(a.bfloat16()) and not cats(a.half()) and not cats(a, b)
    assert not cats(a, out=flat.bfloat16())


# ---- the calls ----


def gathered_and_reduced(scale: float, dtype: torch.dtype, members: int) -> tuple[list, bool]:
    """Asynchronous, of each of both calls; and whether the collective scales."""
    with fake_world(0, 4), record_collectives() as recorder:
        group = p3d.build_mesh(p3d.MeshLayout(1, 4, 1), device_type="cpu").get_group("shard")
        part, whole = torch.zeros(2, dtype=dtype), torch.zeros(8, dtype=dtype)
        first = collectives.all_gather([whole] * members, [part] * members, group, unit="")
        second = collectives.reduce_scatter(
            [whole] * members, group, unit="", device_type="cpu", scale=scale
        )
        assert (first is None) == (second.work is None)
        total = torch.zeros(2, dtype=dtype)
        third = collectives.all_reduce(total, group, unit="")
        assert (first is None) == (third is None)
        assert second.wait().shape == (2 * members,)
    return [call.asynchronous for call in recorder.calls], second.is_scaled


@pytest.mark.parametrize("members", [1, 3])
def test_calls_have_a_work_on_the_cpu_only(members: int) -> None:
    assert gathered_and_reduced(0.25, torch.float32, members) == ([True] * 3, False)
    with on_streams(CountedStreams()):
        assert gathered_and_reduced(0.25, torch.float32, members) == ([False] * 3, True)


@pytest.mark.parametrize(
    ("scale", "dtype", "scales"),
    [
        (1 / 3, torch.float32, True),
        (1 / 8, torch.bfloat16, True),
        (1 / 3, torch.bfloat16, False),  # the factor itself would be off by 2e-3
        (1 / 8, torch.float16, False),  # which may underflow before the sum
        (1.0, torch.float32, False),
    ],
)
def test_nccl_scales_where_it_rounds_nothing(scale: float, dtype: Any, scales: bool) -> None:
    with on_streams(CountedStreams()):
        assert gathered_and_reduced(scale, dtype, 1)[1] == scales


def test_forced_sums_are_scaled_by_a_kernel() -> None:
    def kernels(force: bool) -> int:
        def make() -> nn.Module:
            model = sharded(1, 4, 1)()
            model.set_force_sum_reduction_for_comms(force)
            for net in model:
                net.set_force_sum_reduction_for_comms(force)
            return model

        with fake_world(0, 4):
            return counted(make, torch.randn(4, 8), CountedStreams())[0]["kernels"]

    assert kernels(True) == kernels(False) + 2  # two units


def test_what_compiled_code_may_do_is_looked_for_only_where_something_was_compiled() -> None:
    """The import of torch's compiler, which collectives do, is no compilation."""
    code = (
        "import torch, torch._dynamo\n"
        "from parallel3d._torch.autograd import has_compiled\n"
        "assert not has_compiled()\n"
        "torch.compile(torch.sin, backend='eager')(torch.ones(2))\n"
        "assert has_compiled()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
