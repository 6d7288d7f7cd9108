"""allocator and largest_batch: the memory of a training step, and the largest batch that fits in so much."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from emulated_network import EmulatedNetwork
from llama import LlamaConfig
from memory import PeakMemory
from page import Part
from runner import running
from sides import (
    NAMES,
    SIDES,
    Batch,
    batch_of,
    check_finite,
    loss_of,
    make,
    rank_of_many,
    release,
    state_bytes,
)
from torch import nn
from torch.distributed import DeviceMesh

import parallel3d as p3d

MIB, GIB = 2**20, 2**30
SHAPE = LlamaConfig(4096, 8, 32, 8, 14336, 32_000, 2048)  # eight blocks of an 8B model
TINY = LlamaConfig(256, 4, 4, 2, 768, 256, 64)
FSDP, HSDP = p3d.MeshLayout(shard=64), p3d.MeshLayout(2, 32)


@dataclass
class Peak:
    """The peak of a step, in bytes.

    Attributes:
        allocated: of tensors.
        reserved, segments, retries: of the caching allocator; None on a CPU.
    """

    allocated: int = 0
    reserved: int | None = None
    segments: int | None = None
    retries: int | None = None


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Fills in the peak of the body. On a CPU it counts the storages that operations touch."""
    peak = Peak()
    if device != "cuda":
        with PeakMemory([]) as counted:
            yield peak
        peak.allocated = counted.peak
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    yield peak
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    peak.allocated = torch.cuda.max_memory_allocated()
    peak.reserved = torch.cuda.max_memory_reserved()
    peak.segments = stats.get("segment.all.peak", 0)
    peak.retries = stats.get("num_alloc_retries", 0) - retries


class Training:
    """A model of ``side`` with AdamW, ready to step."""

    def __init__(
        self,
        side: str,
        config: LlamaConfig,
        mesh: DeviceMesh,
        network: EmulatedNetwork,
        device: str,
        dtype: torch.dtype = torch.float32,
        *,
        reshard: bool = True,
        foreach: bool = False,
    ) -> None:
        self.model: nn.Module = make(side, config, mesh, device, dtype=dtype, reshard=reshard)
        kind: dict[str, Any] = {"foreach": True} if foreach else {"fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **kind)
        self.network = network

    def step(self, batch: Batch) -> None:
        """Forward, backward, optimizer."""
        loss_of(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.network.clear()


def allocator(device: str, small: bool) -> Part:
    """Peaks of allocated and reserved memory."""
    config = TINY if small else SHAPE
    tokens = 16 if small else 2048
    part = Part(
        "allocator",
        f"Peak memory of the {'second' if device == 'cpu' else 'fourth'} training step of one rank of 64, "
        f"{config.n_layers} blocks of width {config.dim}, {tokens} tokens, "
        f"bf16 computation, fp32 reduction, fused AdamW: ours against FSDP2",
        ["case", "side", "state MiB", "allocated MiB", "beyond state MiB", "beyond: ours / FSDP2"]
        + ["reserved MiB", "fragmentation MiB", "segments", "retries"],
    )
    settings = (False, True) if device == "cuda" else (False,)
    for expandable in settings:
        if device == "cuda":
            release(device)
            try:
                _set_expandable(expandable)
            except (KeyError, RuntimeError) as error:  # another version, or platform
                part.notes.append(f"expandable segments can't be set to {expandable}: {error}")
                continue
        for layout, name in ((FSDP, "FSDP"), (HSDP, "HSDP")):
            for dtype in (torch.float32, torch.bfloat16)[small:]:
                case = f"{name}, {str(dtype).removeprefix('torch.')} parameters"
                case += ", expandable segments" * expandable
                if part.rows and running().used_up:
                    part.left_out.append(case)
                    continue
                _compare(part, case, layout, config, tokens, device, dtype)
    if device == "cuda":
        release(device)
        with suppress(KeyError, RuntimeError):
            _set_expandable(False)
    else:
        part.notes.append(
            "on a CPU there is no caching allocator: reserved, segments, retries are left out"
        )
    part.notes += [
        "beyond state: less parameters, as many gradients, and the optimizer's state; what it consists of: "
        "python benchmarks/memory.py",
        "fragmentation: reserved less allocated, each at its peak",
        "expected beyond the state, without the activations, which are the same on both sides: 0.70 to 0.75 "
        "of FSDP2's; HSDP with bf16 parameters includes what pytorch issue 179443 describes, which depends "
        "on torch's version",
        "failed if ours allocates over 1 % more than FSDP2. DDP is not measured",
    ]
    return part


def _set_expandable(value: bool) -> None:
    """Changes the caching allocator's setting for the segments to come, by a private function of torch."""
    vars(torch._C)["_accelerator_setAllocatorSettings"](f"expandable_segments:{value}")


def _compare(
    part: Part,
    case: str,
    layout: p3d.MeshLayout,
    config: LlamaConfig,
    tokens: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    found: dict[str, tuple[int, Peak]] = {}
    for side in SIDES:
        if device == "cuda" and (before := torch.cuda.memory_allocated()) > 256 * MIB:
            part.notes.append(f"{case}, {NAMES[side]}: {before / MIB:.0f} MiB were in use before")
        with rank_of_many(layout, device) as (network, mesh):
            training = Training(side, config, mesh, network, device, dtype)
            batch = batch_of(config, tokens, device, length=2048)
            check_finite(part, f"{case}, {NAMES[side]}", partial(loss_of, training.model, batch))
            training.optimizer.zero_grad()
            network.values = False
            for _ in range(1 if device == "cpu" else 3):
                training.step(batch)
            with peak_memory(device) as peak:
                training.step(batch)
            found[side] = state_bytes(training.model, training.optimizer), peak
            del training, batch
    beyond = {side: peak.allocated - state for side, (state, peak) in found.items()}
    for side, (state, peak) in found.items():
        numbers = [state / MIB, peak.allocated / MIB, beyond[side] / MIB]
        ratio = beyond["ours"] / beyond["torch"] if side == "ours" else ""
        reserved: list[Any] = ["", ""]
        if peak.reserved is not None:
            reserved = [peak.reserved / MIB, (peak.reserved - peak.allocated) / MIB]
        counts = ["" if n is None else n for n in (peak.segments, peak.retries)]
        part.rows.append([case, NAMES[side], *numbers, ratio, *reserved, *counts])
        part.data[f"{case}, {NAMES[side]}"] = {"state": state, **vars(peak)}
    if found["ours"][1].allocated > 1.01 * found["torch"][1].allocated:
        part.failed.append(f"{case}: ours allocates more than FSDP2")


def largest_batch(device: str, small: bool) -> Part:
    """The largest batch that trains within a given memory."""
    config = TINY if small else SHAPE
    length = 64 if small else 512
    part = Part(
        "largest_batch",
        f"The largest batch, in sequences of {length} tokens, of which one rank of 64 trains two steps "
        f"within a given memory; {config.n_layers} blocks of width {config.dim}: ours against FSDP2",
        ["memory GiB", "ours", "FSDP2", "ours / FSDP2"],
    )
    caps = (0.02,) if small else (24, 48, 80)
    guess = dict.fromkeys(SIDES, 1)
    for cap in caps:
        if part.rows and running().left < 0.2 * running().seconds:
            part.left_out.append(f"{cap} GiB")
            continue
        if device == "cuda" and cap * GIB >= torch.cuda.get_device_properties(0).total_memory:
            part.notes.append(f"left out, the card has less: {cap} GiB")
            continue
        for side in SIDES:
            with rank_of_many(FSDP, device, values=False) as (network, mesh):
                probe = _Probe(side, config, mesh, network, device, cap, length)
                guess[side] = largest(probe.fits, guess[side])
                part.data[f"{cap} GiB, {NAMES[side]}"] = probe.tried
                del probe
        part.rows.append(
            [cap, guess["ours"], guess["torch"], guess["ours"] / max(guess["torch"], 1)]
        )
        if guess["ours"] < guess["torch"] * 15 // 16:  # the search stops within a 32nd
            part.failed.append(
                f"{cap} GiB: ours takes a batch of {guess['ours']}, FSDP2 {guess['torch']}"
            )
    if device == "cuda":
        part.notes.append(
            "the caching allocator is limited to this memory; the context is not in it"
        )
    else:
        part.notes.append("on a CPU: the batch whose counted peak of tensors is within this memory")
    part.notes.append("collectives write no values")
    return part


class _Probe:
    """Whether a batch fits, by training on it.

    Attributes:
        tried: (sequences, did it fit), in order.
    """

    def __init__(
        self,
        side: str,
        config: LlamaConfig,
        mesh: DeviceMesh,
        network: EmulatedNetwork,
        device: str,
        cap: float,
        length: int,
    ) -> None:
        self._make = lambda: Training(side, config, mesh, network, device)
        self.config, self.device, self.cap, self.length = config, device, cap, length
        self.training: Training | None = None
        self.tried: list[tuple[int, bool]] = []

    def fits(self, sequences: int) -> bool:
        """Trains two steps on so many sequences; on a CPU one."""
        fits = self._on_cuda(sequences) if self.device == "cuda" else self._counted(sequences)
        self.tried.append((sequences, fits))
        return fits

    def _on_cuda(self, sequences: int) -> bool:
        release(self.device)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(self.cap * GIB / total)
        fits = True
        try:
            self._steps(sequences)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            # Out of the handler the error, whose traceback holds the step's tensors, is gone.
            fits = False
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if not fits:
            self.training = None  # its engine was left within a step
        release(self.device)
        return fits

    def _counted(self, sequences: int) -> bool:
        if self.training is None:
            self._steps(1, 1)  # makes the optimizer's state
        with peak_memory(self.device) as peak:
            self._steps(sequences, 1)
        return peak.allocated <= self.cap * GIB

    def _steps(self, sequences: int, steps: int = 2) -> None:
        self.training = self.training or self._make()
        batch = batch_of(self.config, sequences * self.length, self.device, length=self.length)
        for _ in range(steps):
            self.training.step(batch)


def largest(fits: Callable[[int], bool], at_least: int) -> int:
    """Returns the largest number for which ``fits``; ``at_least`` does, where even 1 doesn't it is 0."""
    low, high = 0, max(at_least, 1)
    while fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
