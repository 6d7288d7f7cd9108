"""benchmarks/gpu/bench.py: every part runs without a GPU, on tiny models."""

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from _support.gpu_run import killed_and_resumed

ROOT = Path(__file__).parent.parent
RUN = ROOT / "benchmarks" / "gpu" / "bench.py"


def names() -> list[str]:
    """The parts, of the script's text: what it imports is not imported here."""
    return re.findall(r'^    Task\("(\w+)"', RUN.read_text(), re.MULTILINE)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.full  # minutes
def test_every_part_in_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    page = killed_and_resumed(RUN, tmp_path / "run", names())
    for result in page:
        part = result["part"]
        assert part["rows"] and not part["failed"] and not part["left_out"], part["name"]
        assert all(len(row) == len(part["head"]) for row in part["rows"]), part["name"]
        measured = numbers(part["rows"]) + numbers(part["data"])
        assert measured and all(map(math.isfinite, measured)), part["name"]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of benchmarks/gpu as bench.py does, and forgets it and what it has imported."""
    for folder in (ROOT / "examples" / "llama", ROOT / "benchmarks", RUN.parent):
        monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if str(ROOT / "benchmarks") in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def test_the_kernels_that_copy(parts: Callable[[str], ModuleType]) -> None:
    """A kernel counts for the operation that launched it, in ms; copies from and to the host do not."""
    table = {
        "fsdp::chunk_cat": [],
        "aten::_chunk_cat": [("chunk_cat_cuda_kernel", 500.0)],
        "aten::copy_": [("Memcpy DtoD (Device -> Device)", 1000.0), ("Memcpy HtoD", 9.0)],
        "aten::mm": [("gemm", 7000.0)],
    }
    events = [
        SimpleNamespace(
            name=op, kernels=[SimpleNamespace(name=k, duration=us) for k, us in kernels]
        )
        for op, kernels in table.items()
    ]
    assert parts("copy_kernels").copies_in([*events, *events]) == {
        "aten::copy_: Memcpy DtoD (Device -> Device)": 2.0,
        "aten::_chunk_cat: chunk_cat_cuda_kernel": 1.0,
    }


def test_calls_of_a_unit(parts: Callable[[str], ModuleType]) -> None:
    """Names that the profiler gives CUDA's functions and operations, by kind, a unit and step."""
    found = parts("host_profile").per_unit(
        {
            "cudaLaunchKernel": (60, 600.0),
            "cudaLaunchKernelExC": (30, 90.0),
            "cudaEventRecordWithFlags": (12, 6.0),
            "aten::empty_strided": (6, 12.0),
            "aten::empty_like": (6, 1.0),  # it calls the former
            "c10d::allgather_": (12, 60.0),
            "aten::mm": (6, 12.0),
        },
        2,
    )
    assert found["launches"] == (15.0, 115.0)
    assert found["events recorded"] == (2.0, 1.0)
    assert found["allocations"] == (1.0, 2.0)
    assert found["collectives"] == (2.0, 10.0)
    assert found["events waited for"] == (0.0, 0.0)


def test_search_of_the_largest_batch(parts: Callable[[str], ModuleType]) -> None:
    largest = parts("device_memory").largest
    for most in (0, 1, 2, 7, 64, 201):
        for guess in (1, 5, 100):
            found = largest(lambda n, most=most: n <= most, guess)
            assert found <= most <= found + max(1, found // 32) - (found < 64), (most, guess)


def test_a_batch_that_does_not_fit(parts: Callable[[str], ModuleType], monkeypatch) -> None:
    """The model is made anew after running out of memory, and the limit is lifted."""
    module = parts("device_memory")
    limits: list[float] = []
    total = SimpleNamespace(total_memory=100 * 2**30)
    for name, value in {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: total,
        "set_per_process_memory_fraction": limits.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made: list[object] = []

    class Fake:
        def __init__(self, *_: object) -> None:
            made.append(self)

        def step(self, batch: tuple[torch.Tensor, ...]) -> None:
            if batch[0].numel() > 3 * 64:
                raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(module, "Training", Fake)
    monkeypatch.setattr(module, "batch_of", lambda config, n, *_, **__: (torch.empty(n),))
    probe = module._Probe("ours", module.TINY, None, None, "cuda", 25, 64)
    assert module.largest(probe.fits, 1) == 3
    assert probe.tried == [(1, True), (2, True), (4, False), (3, True)]
    assert len(made) == 2 and limits == [0.25, 1.0] * 4


def test_readme_lists_the_parts() -> None:
    text = (RUN.parent / "README.md").read_text()
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == names()
