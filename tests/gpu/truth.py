"""Truth: our engine against the plain model on one process, and against torch's FSDP2 on the same mesh.

Each rank trains the plain model on the samples of all data ranks, our engine and FSDP2 on its own ones. It
compares losses, every gradient of every step, and the weights after the last one. Then our engine trains
once more from the same seed, and every bit must be the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _support.cp.models import Lm as AttentionLm
from _support.models import LM_PLAN, SEQUENCE_PLAN, TORCHS_PLAN, Lm, lm_loss, tokens
from page import Part
from ranks import Outcome, Rank, backend_of, run_cases
from runner import running
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.testing import shards_of

Sizes = tuple[int, int, int]
MESHES: dict[int, list[Sizes]] = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    4: [(2, 2, 1), (1, 2, 2)],
}
CP_KINDS = ("ulysses", "ring", "gather")
CP = 2  # the size of the axis cp where there is one
CASE_SECONDS = 90.0  # at most; less where a part's share is short
STEPS = 3
CLIP = 0.05


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: what is tested. sizes: of replicate, shard and tp.
        dtype: of the weights. mixed: compute in bfloat16, reduce in float32.
        wire: send gradients in bfloat16.
        offload, hfsdp, local, clip: CPU offload, HFSDP, ``optim.local``, ``clip_grad_norm_``.
        micro_batches: per step. defer: what all but the last defer: ``all_reduce`` or ``sync``.
        skips: whether the second step leaves a block out, so that its unit gets no gradient.
        cp: the kind of attention on an axis cp of two ranks; "": no such axis.
        sequence: sequence parallelism beside tensor parallelism.
        adapters: a LoRA of the peft library is trained, and nothing else.
        float8: the linear layers compute in float8 by torchao, and their weights are gathered so.
        onto: the mesh to continue on from a checkpoint after the second step; None: no checkpoint.
        width, hidden: of the model. Weights of 16 MiB and more are gathered without a copy on a GPU.
        peer: whether FSDP2 can do the same.
    """

    name: str
    sizes: Sizes
    dtype: torch.dtype = torch.float32
    mixed: bool = False
    wire: bool = False
    offload: bool = False
    hfsdp: bool = False
    local: bool = False
    clip: bool = False
    micro_batches: int = 1
    defer: str = "all_reduce"
    skips: bool = False
    cp: str = ""
    sequence: bool = False
    adapters: bool = False
    float8: bool = False
    onto: Sizes | None = None
    width: int = 12
    hidden: int = 20
    peer: bool = True

    @property
    def layout(self) -> p3d.MeshLayout:
        return p3d.MeshLayout(*self.sizes, cp=CP if self.cp else 1)

    @property
    def library(self) -> str:
        """What it needs beside torch."""
        return "peft" if self.adapters else "torchao.float8" if self.float8 else ""

    @property
    def mesh(self) -> str:
        """Its mesh, in words."""
        return f"{self.sizes}, cp {CP}" if self.cp else str(self.sizes)

    @property
    def label(self) -> str:
        return f"{self.name} {self.mesh}"

    @property
    def bounds(self) -> tuple[float, float]:
        """How far loss and gradients, and weights, may be from the plain model's; relative."""
        if self.dtype is torch.float64:
            return 1e-9, 1e-8
        # A weight that is only rounded elsewhere may become the next float8.
        if self.float8:
            return 5e-2, float("inf")
        # bfloat16 has 8 bits: the plain model computes in float32. The weights of AdamW are not compared
        # with it: a gradient that is only rounding moves a weight as far as any.
        return (1e-1, float("inf")) if self.mixed else (2e-5, 1e-4)

    @property
    def peer_bounds(self) -> tuple[float, float]:
        """The same from FSDP2 of the same policy. Its matrix products may be by other kernels, as its
        weights are aligned otherwise: in bfloat16 an activation may then be rounded to its neighbour. With
        tp activations are sums that are rounded elsewhere."""
        return (5e-2, float("inf")) if self.mixed else self.bounds


def cases(world: int, *, small: bool) -> list[Case]:
    """The trainings of a world. ``small``: a small model, and each kind of training on one mesh."""
    sizes: dict[str, Any] = {} if small else {"width": 256, "hidden": 1024}
    make: Callable[..., Case] = functools.partial(Case, **sizes)
    found: list[Case] = []
    for sharded in {2: (1,), 4: (2,)}.get(world, ()):
        for kind in CP_KINDS:
            on = (1, sharded, 1)
            found.append(make(f"cp {kind}", on, torch.float64, cp=kind, peer=False))
            if not small:
                found.append(make(f"cp {kind} bf16", on, mixed=True, cp=kind, peer=False))
        on = (1, sharded, 2)
        found.append(make("sequence fp64", on, torch.float64, sequence=True, peer=False))
        if not small:
            found.append(make("sequence bf16", on, mixed=True, sequence=True, peer=False))
    for mesh in MESHES[world]:
        found.append(make("fp64", mesh, torch.float64))
        found.append(make("bf16/fp32", mesh, mixed=True))
        if not small or world == 1:
            found.append(make("fp32", mesh))
    for mesh in MESHES[world]:
        if mesh[2] > 1:
            continue
        if not small or world == 1:
            found.append(make("offload", mesh, offload=True))
            found.append(make("accumulate", mesh, micro_batches=3))
            found.append(make("no sync", mesh, micro_batches=3, defer="sync"))
            found.append(make("no gradient", mesh, skips=True))
        if world > 1 and (not small or world == 4):
            found.append(make("bf16 wire", mesh, mixed=True, wire=True))
        if mesh[0] > 1 and not small:
            found.append(make("HFSDP", mesh, hfsdp=True))
        if mesh[0] > 1 and (not small or world == 4):
            found.append(make("HFSDP bf16", mesh, mixed=True, hfsdp=True))
            found.append(make("offload bf16", mesh, mixed=True, offload=True))
    for mesh in MESHES[world] if world != 2 else MESHES[world][::2]:
        if small and mesh[2] == 1 and world > 1:
            continue
        found.append(make("clip", mesh, clip=True, peer=mesh[2] == 1))
        found.append(make("optim.local", mesh, local=True))
    onto: dict[int, list[tuple[Sizes, Sizes]]] = {
        1: [((1, 1, 1), (1, 1, 1))],
        2: [((1, 2, 1), (2, 1, 1)), ((1, 1, 2), (1, 2, 1))],
        4: [((2, 2, 1), (1, 2, 2))],
    }
    for first, second in onto[world]:
        found.append(make("checkpoint", first, torch.float64, onto=second, peer=False))
    if not small and world > 1:
        mesh = MESHES[world][0]
        found.append(Case("large weights", mesh, mixed=world == 4, width=1024, hidden=4608))
    return found


def of_libraries(world: int, *, small: bool) -> list[Case]:
    """The trainings with other libraries' layers."""
    sizes: dict[str, Any] = {"width": 32, "hidden": 64} if small else {"width": 256, "hidden": 1024}
    mesh = MESHES[world][0]
    lora = [Case("LoRA", mesh, torch.float64, adapters=True, **sizes)]
    if not small:
        lora.append(Case("LoRA bf16", mesh, mixed=True, adapters=True, **sizes))
    return [*lora, Case("float8", mesh, float8=True, **sizes)]


def missing(case: Case, device_type: str) -> str:
    """Returns why a training can't run here; "" if it can."""
    library = case.library.partition(".")[0]
    if library and importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    if case.float8 and device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return f"float8 needs compute capability 8.9, this card has {capability}"
    return ""


# -- the model, plain and on three engines --------------------------------------------------------------


class Model(Lm):
    """An ``Lm`` that can leave out its last block."""

    skips = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers[: -1 if self.skips else None]:
            x = layer(x)
        return self.head(self.norm(x))


VOCAB, LAYERS = 20, 3


def build(case: Case, device: torch.device, seed: int = 0) -> Any:
    """The plain model; the same on all ranks."""
    torch.manual_seed(seed)
    model: nn.Module = AttentionLm() if case.cp else Model(case.width, case.hidden, LAYERS, VOCAB)
    if case.adapters:
        peft = importlib.import_module(case.library)
        # Not zeros, as they are by default: each adapter then has a gradient.
        config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    if case.float8:
        float8 = importlib.import_module(case.library)
        emulate = device.type == "cpu"
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
        model = float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: name != "head"
        )
    return model.to(case.dtype).to(device)


def ours(model: Any, case: Case, mesh: DeviceMesh) -> Any:
    """``model`` on our engine."""
    policy = p3d.MixedPrecisionPolicy()
    if case.mixed:
        wire = torch.bfloat16 if case.wire else None
        policy = p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32, wire_dtype=wire)
    if case.offload:
        pinned = p3d.fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        shard = functools.partial(
            p3d.fully_shard, mesh=mesh, mp_policy=policy, offload_policy=pinned
        )
        for layer in model.layers:
            shard(layer)
        shard(model)
        return model
    plan: Any = LM_PLAN if case.sizes[2] > 1 or (case.onto or (1, 1, 1))[2] > 1 else None
    return p3d.parallelize(
        model,
        mesh,
        SEQUENCE_PLAN if case.sequence else plan,
        mp_policy=policy,
        shard_optimizer_over_replicate=case.hfsdp,
        context_parallel=case.cp or None,
    )


def torchs(model: Any, case: Case, mesh: DeviceMesh) -> Any:
    """``model`` on torch's FSDP2 and its tensor parallelism."""
    policy = fsdp.MixedPrecisionPolicy()
    if case.mixed:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case.sizes[2] > 1:
        # None: every rank has the same values, nothing to send.
        parallelize_module(model, mesh["tp"], TORCHS_PLAN, src_data_rank=None)
    options: dict[str, Any] = {"mp_policy": policy}
    if case.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    data = mesh["replicate", "shard"] if case.sizes[0] > 1 else mesh["shard"]
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=data, **options)
    fsdp.fully_shard(model, mesh=data, **options)
    return model


# -- one training ---------------------------------------------------------------------------------------

# This rank's part of a tensor: where it lies in the whole, and its values; by name.
Parts = dict[str, list[tuple[tuple[slice, ...], torch.Tensor]] | None]


@dataclass
class Record:
    """What a training has computed: losses of this rank, gradients of each step, norms, final weights."""

    losses: list[torch.Tensor] = field(default_factory=list)
    grads: list[Parts] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    weights: Parts = field(default_factory=dict)


def parts_of(model: nn.Module, of: Callable[[torch.Tensor], torch.Tensor | None]) -> Parts:
    """Copies to the CPU what this rank has of ``of(parameter)``."""
    found: Parts = {}
    for name, param in model.named_parameters():
        tensor = of(param)
        found[name] = None
        if tensor is not None:
            found[name] = [(box, part.detach().cpu().clone()) for _, box, part in shards_of(tensor)]
    return found


def optimizer_of(model: nn.Module, case: Case, *, local: bool = False) -> torch.optim.Optimizer:
    """AdamW. In float32 with an eps that keeps a gradient that is only rounding from a full step."""
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8 if case.dtype is torch.float64 else 1e-3}
    if local:
        return p3d.optim.local(torch.optim.AdamW, model, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def sample(case: Case, step: int, micro: int, data_rank: int, device: torch.device) -> torch.Tensor:
    """What one data rank reads in one micro-batch."""
    number = (step * case.micro_batches + micro) * case.layout.data_size + data_rank
    # Sequences are divided by cp and tp, and float8's products take multiples of 16 tokens.
    shape = (4, 8) if case.cp or case.sequence or case.float8 else (2, 5)
    return tokens(number, *shape, vocab=VOCAB).to(device)


def loss_of(model: Any, ids: torch.Tensor, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The next token's loss; with a ``mesh`` of this cp rank's part of the sequences, whose mean it is."""
    if not isinstance(model, AttentionLm):
        return lm_loss(model, ids)
    parts: tuple[torch.Tensor, torch.Tensor] = (ids, ids.roll(-1, 1))
    if mesh is not None:
        parts = p3d.cp.shard_batch(parts, mesh)
    return F.cross_entropy(model(parts[0]).flatten(0, 1), parts[1].flatten())


def mean_over_cp(loss: torch.Tensor, mesh: DeviceMesh, case: Case) -> torch.Tensor:
    """The loss of whole sequences, on the CPU."""
    loss = loss.detach().clone()
    if case.cp:
        dist.all_reduce(loss, group=mesh["cp"].get_group())
        loss /= CP
    return loss.cpu()


def train_plain(case: Case, here: Rank) -> Record:
    """The plain model, on the samples of all data ranks."""
    model, record = build(case, here.device), Record()
    optimizer = optimizer_of(model, case)
    own, size = case.layout.data_rank(here.rank), case.layout.data_size
    for step in range(STEPS):
        model.skips = case.skips and step == 1
        for micro in range(case.micro_batches):
            for data_rank in range(size):
                loss = loss_of(model, sample(case, step, micro, data_rank, here.device))
                (loss / (size * case.micro_batches)).backward()
                if data_rank == own:
                    record.losses.append(loss.detach().cpu())
        if case.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            record.norms.append(norm.detach().cpu())
        record.grads.append(parts_of(model, lambda param: param.grad))
        optimizer.step()
        optimizer.zero_grad()
    record.weights = parts_of(model, torch.Tensor.detach)
    return record


def train(case: Case, here: Rank, *, peer: bool, folder: Path) -> Record:
    """Our engine, or FSDP2 (``peer``), on the samples of this rank."""
    wrap = torchs if peer else ours
    mesh = here.mesh(case.layout)
    model, record = wrap(build(case, here.device), case, mesh), Record()
    optimizer = optimizer_of(model, case, local=case.local and not peer)
    now = case
    for step in range(STEPS):
        if case.onto is not None and step == STEPS - 1:
            p3d.checkpoint.save(folder, model, optimizer, step=step)
            model = ours(
                build(case, here.device, seed=1), case, here.mesh(p3d.MeshLayout(*case.onto))
            )
            optimizer = optimizer_of(model, case)
            p3d.checkpoint.load(folder, model, optimizer)
            now = Case(case.name, case.onto, case.dtype)
        model.skips = case.skips and step == 1
        own = now.layout.data_rank(here.rank)
        # After a checkpoint other ranks are data ranks, of which there may be fewer: the same samples.
        mine = range(own, case.layout.data_size, now.layout.data_size)
        if now.layout.data_size > case.layout.data_size:
            mine = range(own % case.layout.data_size, case.layout.data_size, case.layout.data_size)
        micro_batches = [(micro, rank) for micro in range(case.micro_batches) for rank in mine]
        for micro, rank, last in _deferred(model, micro_batches, case, peer=peer):
            loss = loss_of(model, sample(case, step, micro, rank, here.device), mesh)
            (loss / len(micro_batches)).backward()
            if last or case.onto is None:
                record.losses.append(mean_over_cp(loss, mesh, case))
        if case.clip and peer:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            record.norms.append(norm.full_tensor().detach().cpu())
        elif case.clip:
            record.norms.append(p3d.optim.clip_grad_norm_(model, CLIP).detach().cpu())
        record.grads.append(parts_of(model, lambda param: param.grad))
        optimizer.step()
        optimizer.zero_grad()
    record.weights = parts_of(model, torch.Tensor.detach)
    return record


def _deferred(
    model: Any, micro_batches: list[tuple[int, int]], case: Case, *, peer: bool
) -> Iterator[tuple[int, int, bool]]:
    """Yields (micro-batch, data rank, is it the last), with what all but the last defer set."""
    for number, (micro, rank) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        if len(micro_batches) > 1 and case.defer == "sync":
            model.set_requires_gradient_sync(last)
        elif len(micro_batches) > 1:
            model.set_requires_all_reduce(last)
        yield micro, rank, last


# -- comparison -----------------------------------------------------------------------------------------


def compare(record: Record, against: Record, *, losses: bool = True) -> dict[str, float]:
    """The largest relative differences of losses, gradients (of the model's largest) and weights."""
    found = {"loss": 0.0, "grads": 0.0, "weights": 0.0}
    if losses:
        pairs = zip(record.losses, against.losses, strict=True)
        found["loss"] = max(float((a.double() - b.double()).abs() / b.abs()) for a, b in pairs)
    for a, b in zip(record.norms, against.norms, strict=True):
        found["norm"] = max(found.get("norm", 0.0), float((a.double() - b).abs() / b))
    for mine, theirs in zip(record.grads, against.grads, strict=True):
        found["grads"] = max(found["grads"], _apart(mine, theirs))
    found["weights"] = _apart(record.weights, against.weights)
    return found


def _apart(parts: Parts, others: Parts) -> float:
    """The largest difference of two models' parts, by the largest value of ``others``; nan if one is."""
    largest = max(
        (float(t.abs().max()) for each in others.values() for _, t in each or () if t.numel()),
        default=1.0,
    )
    worst = 0.0
    if list(parts) != list(others):
        return float("inf")
    for name, mine in parts.items():
        theirs = others[name]
        if (mine is None) != (theirs is None):
            return float("inf")  # only one of them has a gradient
        for box, part in mine or ():
            want = _at(box, theirs or [])
            if want is None:  # the peer shards another dim: its plain model's comparison is enough
                continue
            if part.shape != want.shape:
                return float("inf")
            if part.numel():
                difference = float((part.double() - want.double()).abs().max())
                if not difference <= worst * largest:
                    worst = difference / max(largest, 1e-30)
                if worst != worst:
                    return worst
    return worst


def _at(box: tuple[slice, ...], parts: list[tuple[tuple[slice, ...], torch.Tensor]]) -> Any:
    """The values at ``box`` of a whole tensor, or of a part of it at the same place; None: not there."""
    for place, part in parts:
        if all(each == slice(None) for each in place):
            return part[box]
        if place == box:
            return part
    return None


def same_bits(a: Record, b: Record) -> bool:
    """Whether two trainings have computed the same, bit for bit."""
    tensors = [*zip(a.losses + a.norms, b.losses + b.norms, strict=True)]
    for mine, theirs in zip([*a.grads, a.weights], [*b.grads, b.weights], strict=True):
        for name, parts in mine.items():
            pairs = zip(parts or (), theirs[name] or (), strict=True)
            tensors += [(x, y) for (_, x), (_, y) in pairs]
    return all(torch.equal(x, y) for x, y in tensors)


def work(here: Rank, case: Case) -> dict[str, Any]:
    """One case on one rank."""
    plain = train_plain(case, here)
    name = case.label.replace(" ", "_").replace("/", "_")
    records = [
        train(case, here, peer=False, folder=here.folder / f"{name}-{number}") for number in (0, 1)
    ]
    losses = case.onto is None
    found: dict[str, Any] = {"plain": compare(records[0], plain, losses=losses)}
    found["repeats"] = same_bits(*records)
    if case.peer:
        try:
            theirs = train(case, here, peer=True, folder=here.folder)
        except Exception as error:  # of torch's: said, and no fault of ours
            found["peer_error"] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            found["peer"] = compare(records[0], theirs, losses=losses)
            found["peer_plain"] = compare(theirs, plain, losses=losses)
    return found


# -- the part -------------------------------------------------------------------------------------------

KINDS = ("loss", "grads", "weights")
HEAD = ["mesh", "case", "ranks' backend"]
HEAD += [f"{what} of {kind}" for what in ("ours - plain", "ours - FSDP2") for kind in KINDS]
HEAD += ["FSDP2 - plain of grads", "repeats", "verdict"]


def _truth(world: int, device_type: str, small: bool) -> Part:
    """The part ``truth1``: one process; ``truth2`` and ``truth4``: ranks."""
    return run(f"truth{world}", world, cases(world, small=small), device_type)


truth1, truth2, truth4 = (functools.partial(_truth, world) for world in (1, 2, 4))


def libraries(device_type: str, small: bool) -> Part:
    """The part ``libraries``: LoRA of peft, and float8 of torchao, on two ranks."""
    return run("libraries", 2, of_libraries(2, small=small), device_type)


def run(name: str, world: int, wanted: list[Case], device_type: str) -> Part:
    """A part of these trainings."""
    part = Part(name, "losses, gradients and weights: ours, the plain model, FSDP2", HEAD)
    for case in wanted:
        if why := missing(case, device_type):
            part.notes.append(f"{case.label} did not run: {why}")
    wanted = [case for case in wanted if not missing(case, device_type)]
    # What an earlier run has found right is not run again.
    part.rows = [row for row in running().before.get("rows", []) if row[-1] == "ok"]
    right = {(row[0], row[1]) for row in part.rows}
    wanted = [case for case in wanted if (case.mesh, case.name) not in right]
    part.data = dict(running().before.get("data", {}))
    backend, why = backend_of(device_type, world, running().folder) if wanted else ("", "")
    if why:
        part.notes.append(
            f"NCCL does not run {world} ranks on one card here, so these ran on gloo: {why}"
        )
    by_label = {case.label: case for case in wanted}
    outcome = run_cases(
        work,
        list(by_label.items()),
        world=world,
        device_type=device_type,
        backend=backend,
        folder=running().folder,
        limit=running().limit(CASE_SECONDS),
        deadline=running().end,
        imports=[case.library for case in wanted if case.library],
        each=lambda label, outcome: _report(part, by_label[label], outcome),
    )
    part.left_out += outcome.left_out
    part.notes.append(
        "differences are relative: losses to the loss, gradients and weights to the model's largest"
    )
    part.notes.append(
        "bounds of loss and gradients, of weights: float64 1e-9, 1e-8; float32 2e-5, 1e-4; bfloat16 1e-1 "
        "from the plain float32 model, 5e-2 from FSDP2, weights not judged"
    )
    part.notes.append(
        "AdamW, with eps 1e-3 but in float64; repeats: a second run of the same seed gave the same bits"
    )
    return part


def _report(part: Part, case: Case, outcome: Outcome) -> None:
    """Adds the row of a case, and what is wrong."""
    if case.label in outcome.failed:
        part.failed.append(f"{case.label}: {outcome.failed[case.label]}")
        row = [case.mesh, case.name, outcome.backend]
        part.rows.append(row + [""] * (len(HEAD) - 4) + ["FAILED"])
        return
    ranks = outcome.results[case.label]
    part.data[case.label] = ranks
    wrong = _wrong(case.bounds, "the plain model's", [r["plain"] for r in ranks])
    peers = [r["peer"] for r in ranks if "peer" in r]
    apart = [r["peer_plain"] for r in ranks if "peer_plain" in r]
    at_fault = bool(apart) and bool(_wrong(case.bounds, "", apart))
    if at_fault:
        part.notes.append(f"{case.label}: FSDP2 itself is not within the bounds of the plain model")
    elif peers:
        wrong += _wrong(case.peer_bounds, "FSDP2's", peers)
    part.notes += sorted(
        {f"{case.label}: FSDP2 {r['peer_error']}" for r in ranks if "peer_error" in r}
    )
    if not all(r["repeats"] for r in ranks):
        wrong.append("a second run gave other bits")
    part.failed += [f"{case.label}: {each}" for each in wrong]
    part.rows.append(
        [case.mesh, case.name, outcome.backend]
        + [_worst([r["plain"] for r in ranks], kind) for kind in KINDS]
        + [_worst(peers, kind) if peers else "" for kind in KINDS]
        + [_worst(apart, "grads") if apart else ""]
        + ["yes" if all(r["repeats"] for r in ranks) else "NO", "FAILED" if wrong else "ok"]
    )


def _wrong(bounds: tuple[float, float], whose: str, ranks: list[dict[str, float]]) -> list[str]:
    found = []
    for kind in (*KINDS, "norm"):
        worst, bound = _worst(ranks, kind), bounds[kind == "weights"]
        if not worst <= bound and bound != float("inf"):  # nan is not, either
            found.append(f"{kind} differ from {whose} by {worst:.3g}, more than {bound:g}")
    return found


def _worst(ranks: list[dict[str, float]], kind: str) -> float:
    """The largest of all ranks; nan if one is."""
    values = [rank.get(kind, 0.0) for rank in ranks]
    return next((v for v in values if v != v), max(values, default=0.0))
