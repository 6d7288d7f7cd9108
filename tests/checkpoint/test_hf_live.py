"""hf_tensors and hf_shards: what save_hf writes, bit for bit, without files; peak memory of both."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from _support.checkpoint.hf_cases import (
    CONFIGS,
    Sizes,
    check_live,
    compared,
    plain,
    same,
    same_error_everywhere,
)
from _support.packed_models import even_lm, packed_plan, uneven_lm
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d import (
    CheckpointError,
    MeshLayout,
    StateError,
    WrongTypeError,
    build_mesh,
    guards,
    materialize,
    parallelize,
)
from parallel3d._layout.packed import PackedDTensor
from parallel3d.checkpoint import hf_shards, hf_tensors, save_hf
from parallel3d.checkpoint.hf import conversion
from parallel3d.checkpoint.hf.layout import permuted, reshaped, whole_of
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.ci

FOUR = [(1, 2, 2), (2, 1, 2), (1, 4, 1), (2, 2, 1)]
MESHES = [*((sizes, list(CONFIGS)) for sizes in FOUR), ((4, 1, 1), ["tied"]), ((1, 1, 4), ["phi3"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        pytest.param(*each, marks=[pytest.mark.full] * (1 < at < 4))
        for at, each in enumerate(MESHES)
    ],
    ids=str,
)
def test_equal_to_save_hf(
    gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes, kinds: list[str]
) -> None:
    cases = [(kind, None) for kind in kinds if kind != "gpt2" or sizes[2] == 1]
    cases += [(kind, torch.bfloat16) for kind in kinds if kind == "mixtral"]
    gloo_pool.run(check_live, cases, sizes, str(tmp_path), world_size=4)


def small(sizes: Sizes = (1, 2, 1)) -> nn.Module:
    """Uneven, with a buffer, of 1.2 KB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 17), nn.BatchNorm1d(17), nn.Linear(17, 3))
    return parallelize(model, build_mesh(MeshLayout(*sizes), device_type="cpu"))


TINY = 0.0001  # MiB: each tensor is a batch


def test_one_process() -> None:
    model = nn.Sequential(nn.Linear(9, 17), nn.BatchNorm1d(17), nn.Linear(17, 3))
    source = hf_tensors(model, buffer_mib=TINY, dtype=torch.bfloat16, names=lambda n: f"m.{n}")
    for _ in range(2):
        found = dict(source)
        for name, value in model.state_dict().items():
            whole = found[f"m.{name}"]
            floats = value.is_floating_point()
            assert whole.dtype == (torch.bfloat16 if floats else value.dtype)
            assert torch.equal(whole, value.to(whole.dtype))
        with torch.no_grad():
            model[0].weight.add_(1)  # between two transfers
    for name, box, values in hf_shards(model):
        assert torch.equal(values, model.state_dict()[name]) and values.shape == box.sizes
        assert values.data_ptr() == model.state_dict()[name].data_ptr()


class Interleaved(nn.Module):
    """Its halves lie in every other row of the file's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3))


def test_rows_that_are_not_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a box of its own."""
    model = Interleaved()
    rows = whole_of("weight", (8, 3))
    halves = reshaped(permuted(reshaped(rows, (2, 4, 3)), (1, 0, 2)), (8, 3))
    monkeypatch.setattr(
        conversion,
        "whole_of",
        lambda name, shape: halves if name == "weight" else pytest.fail(name),
    )
    want = model.weight.view(2, 4, 3).permute(1, 0, 2).reshape(8, 3)
    found = torch.zeros(8, 3)
    boxes = [box for _, box, values in hf_shards(model) if found[box.slices].copy_(values).numel()]
    assert torch.equal(found, want) and sum(box.sizes[0] for box in boxes) == 8
    assert torch.equal(dict(hf_tensors(model))["weight"], want)


# -- leaving the loop ----------------------------------------------------------------------------------


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leaves(to: object, how: str) -> list[str]:
    """Rank ``to``, or 1, leaves at the second tensor; then all save and transfer again."""
    model, rank = small(), dist.get_rank()
    who = 1 if to == "all" else to

    def loop() -> None:
        for number, _ in enumerate(hf_tensors(model, to=to, buffer_mib=TINY)):
            if number == 1 and (rank == who or how == "all break"):
                if how == "raise":
                    raise LookupError("the engine is gone")
                break

    start = time.monotonic()
    first = outcome(loop)
    assert time.monotonic() - start < 20
    again = dict(hf_tensors(model))  # the group is made anew
    assert torch.equal(again["0.weight"], full_params_of(model)["0.weight"])
    return [first, ""]


def full_params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


ENDINGS = [("all", "raise"), (0, "break"), ("all", "all break")]
OTHER_ENDINGS = [("all", "break"), (0, "raise"), (0, "all break")]


@pytest.mark.parametrize(
    ("to", "how"),
    [*ENDINGS, *(pytest.param(*ending, marks=pytest.mark.slow) for ending in OTHER_ENDINGS)],
)
def test_leaving_early(gloo_pool: GlooPool, to: object, how: str) -> None:
    found = [first for first, _ in gloo_pool.run(leaves, to, how, world_size=2)]
    who = 1 if to == "all" else 0
    left, other = found[who], found[1 - who]
    assert left == ("LookupError: the engine is gone" if how == "raise" else "")
    if how == "all break" and to == "all":
        assert other == ""
    else:
        assert other.startswith(
            "PeerFailureError: hf_tensors: another rank failed, or left the loop"
        )
        assert "iterate to the end" in other


def fails_under_watch() -> str:
    model = small()

    def loop() -> None:
        with guards.watch(grace=timedelta(seconds=1)):
            for number, _ in enumerate(hf_tensors(model, buffer_mib=TINY)):
                if number == 1 and dist.get_rank() == 1:
                    raise LookupError("the engine is gone")

    return outcome(loop)


@pytest.mark.slow
def test_the_watch_names_who_failed(gloo_pool: GlooPool) -> None:
    waits, fails = gloo_pool.run(fails_under_watch, world_size=2)
    assert fails.startswith("LookupError")
    assert waits.startswith("PeerFailureError") and "rank 1 failed first" in waits


# -- what is refused -----------------------------------------------------------------------------------


def refused() -> None:
    model, rank = small(), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    bad = [
        ({"to": 2}, "to is 2; give 'all', or.* ranks? 0"),
        ({"to": True}, "to is True"),
        ({"to": "first"}, "to is 'first'"),
        ({"to": rank}, "to differs: 0 on rank 0, 1 on rank 1"),
        ({"buffer_mib": 0}, "buffer_mib is 0; give MiB, above 0"),
        ({"buffer_mib": float("nan")}, "buffer_mib is nan"),
        ({"dtype": torch.int8}, "dtype is torch.int8; give a floating-point"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"names": {"nowhere": "a"}}, "nowhere"),
    ]
    for options, says in bad:
        same_error_everywhere(says, lambda options=options: hf_tensors(model, **options))
    for function in (hf_tensors, hf_shards):
        with pytest.raises(WrongTypeError, match="model is str"):
            function("gpt2")
    with pytest.raises(CheckpointError, match="dtype is"):
        hf_shards(model, dtype=torch.int8)
    with full_params(model, writeback=False):
        same_error_everywhere("full_params", lambda: hf_tensors(model))
        with pytest.raises(StateError, match="full_params"):
            hf_shards(model)
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    same_error_everywhere("on meta", lambda: hf_tensors(empty))
    with pytest.raises(CheckpointError, match="hf_shards: 'weight' is on meta"):
        hf_shards(empty)

    def changed(change: Callable[[], object]) -> None:
        for number, _ in enumerate(hf_tensors(model, buffer_mib=TINY)):
            if number == 1:
                change()

    x = torch.randn(4, 9)
    model(x).sum().backward()
    same_error_everywhere("was changed before the last", lambda: changed(optimizer.step))
    # on one rank only: all are told
    same_error_everywhere(
        "on rank 1: .*was changed",
        lambda: changed(optimizer.step if rank == 1 else optimizer.zero_grad),
    )
    with torch.no_grad():
        same_error_everywhere("'2.bias' was changed", lambda: changed(model[2].bias.zero_))
    changed(lambda: model.eval()(x).sum().backward())  # which only reads
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    changed(other.step)
    source = hf_tensors(model)
    model[0] = nn.Linear(9, 17)
    same_error_everywhere("'0.weight' was replaced since", lambda: list(source))


def test_what_is_refused(gloo_pool: GlooPool) -> None:
    gloo_pool.run(refused, world_size=2)


# -- other places of weights ---------------------------------------------------------------------------


def elsewhere(folder: str) -> None:
    for number, (build, sizes) in enumerate(((even_lm, (1, 2, 2)), (uneven_lm, (1, 1, 4)))):
        torch.manual_seed(5)
        model = build()
        mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
        parallelize(model, mesh, tp_plan=packed_plan(model))
        assert any(isinstance(p, PackedDTensor) for p in model.parameters())
        compared(model, f"{folder}/packed-{number}", names=lambda name: f"m.{name}")
    model = plain("llama")
    model.model.embed_tokens.requires_grad_(False)
    mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    compared(model, f"{folder}/offloaded", torch.float16)
    for rows in (1024, 1025):  # as large as to be gathered in place, if the shards are even
        model = nn.Sequential(nn.Linear(512, rows), nn.Linear(rows, 8))
        parallelize(model, build_mesh(MeshLayout(1, 4, 1), device_type="cpu"))
        compared(model, f"{folder}/large-{rows}")
        compared(model, f"{folder}/large-{rows}-half", torch.bfloat16)
    part = DeviceMesh("cpu", [1, 3], mesh_dim_names=("shard",))
    if part.get_coordinate() is not None:
        model = fully_shard(plain("llama"), mesh=part)
        found = dict(hf_tensors(model, to=3, buffer_mib=0.1))
        if dist.get_rank() == 3:
            same(found, dict(plain("llama").named_parameters()))
        else:
            assert not found
        with pytest.raises(CheckpointError, match=r"to is 0; give.*ranks 1, 3"):
            hf_tensors(model, to=0)


@pytest.mark.slow
def test_packed_offloaded_frozen_part_of_the_world(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(elsewhere, str(tmp_path), world_size=4)


def adapters(folder: str) -> None:
    peft = pytest.importorskip("peft")
    model = plain("llama")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    parallelize(model, build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
    compared(model, folder)
    assert any("lora_A" in meta.name for meta in hf_tensors(model).metadata())


@pytest.mark.slow
def test_adapters_are_tensors_of_their_own(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(adapters, str(tmp_path), world_size=2)


# -- memory --------------------------------------------------------------------------------------------


def growths(buffer_mib: float) -> dict[str, float]:
    """MiB by which this rank's memory grows."""
    import checkpoint_memory as script

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)], nn.Linear(1024, 8192))
    parallelize(model, build_mesh(MeshLayout(1, 4, 1), device_type="cpu"))
    materialize(model, device="cpu")
    small = parallelize(nn.Linear(64, 64), build_mesh(MeshLayout(1, 4, 1), device_type="cpu"))

    def all_of(model: nn.Module, to: object) -> None:
        for name, values in hf_tensors(model, to=to, buffer_mib=buffer_mib):
            del name, values

    found = {}
    with freed_memory_given_back():
        for to in ("all", 0):
            all_of(small, to)  # what is made once
            # What else grows meanwhile (gloo's buffers, another thread's) does so once.
            grown = [script.growth(partial(all_of, model, to)) for _ in range(3)]
            found[str(to)] = min(grown) / 2**20
    return found


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """malloc returns blocks of 64 KiB at once; else what it keeps depends on what the process did before."""
    mmap_threshold, largest = -3, 32 << 20
    malloc = ctypes.CDLL(None).mallopt
    assert malloc(mmap_threshold, 64 << 10)
    yield
    malloc(mmap_threshold, largest)


@pytest.mark.slow
@pytest.mark.parametrize("buffer_mib", [4, 16, 128])
def test_memory(gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch, buffer_mib: float) -> None:
    """64 MiB, whose largest tensor has 32."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    limit, noise = max(buffer_mib, 32 + buffer_mib / 2), 6
    for rank, found in enumerate(gloo_pool.run(growths, buffer_mib, world_size=4)):
        assert 30 < found["all"] < limit + noise, found
        least, most = (30, limit) if rank == 0 else (-1, buffer_mib / 2 / 9)
        assert least < found["0"] < most + noise, found


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.full  # benchmarks/checkpoint_memory.py measures it, too
def test_peak_memory(gloo_pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import checkpoint_memory as script

    for name, sizes in (("small", script.SMALL), ("large", script.SIZES)):
        model = materialize(script.llama(sizes), device="cpu")
        save_hf(tmp_path / name / "in", model)
    largest = max(p.nbytes for p in model.parameters())
    del model
    rows = script.case(gloo_pool, (1, 4, 1), str(tmp_path), largest)
    assert {row["what"] for row in rows} >= {"load_hf", "save_hf"}
    for row in rows:
        bound = 1.5 * row["shard_bytes"] + row["largest_bytes"]
        assert row["shard_bytes"] <= row["peak_bytes"] <= bound, row
