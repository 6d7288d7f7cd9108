"""A tiny transformers model, plain and parallel, side by side on real processes."""

import copy
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from _support.hf.all_double import AllDouble
from _support.hf.tiny import LENGTH, VARIANTS, is_moe, tiny_model
from parallel3d import Checks, MeshLayout, build_mesh, cp, parallelize
from parallel3d.errors import PlanError, StateError
from parallel3d.testing.parity import shards_of

Sizes = tuple[int, ...]

# What each family is run as: the variant of its tiny config, and the sizes of the mesh, (replicate, shard,
# tp), (replicate, shard, cp, tp) or (replicate, shard, cp, tp, ep).
CASES: tuple[tuple[str, Sizes], ...] = (
    ("base", (1, 1, 2)),
    ("odd", (1, 1, 2)),
    ("odd", (1, 2, 2)),
    ("base", (2, 1, 2)),
)

CP_CASE: tuple[str, Sizes] = ("base", (1, 1, 2, 1))

EP_CASES: tuple[tuple[str, Sizes], ...] = (
    ("base", (1, 4, 1, 1, 2)),
    ("base", (1, 2, 1, 2, 4)),
    ("odd", (2, 2, 1, 1, 2)),
)

# Everything is float64 (AllDouble), so equal means equal but for the order of sums. Each tensor is
# held to its own largest value; the second term is for tensors that would be zero exactly.
OWN, MODELS = 1e-8, 1e-13
LEARNING_RATE = 0.1


Case = tuple[str, str, Sizes]
"""A family, a variant of its tiny config, and the sizes of a mesh."""

Plan = dict[str, str] | str


@dataclass(frozen=True)
class Outcome:
    """What became of one family on one mesh.

    Attributes:
        verdict: ``"equal"``, ``"refused"`` (PlanError; StateError where the model writes its own weights),
            ``"failed"`` (any other error), or ``"unequal"``.
        note: the reason, or the tensors that differ.
        worst: largest difference, relative to the tensor's largest value.
        held: share of the parameters' numbers that a tp rank holds.
    """

    verdict: str
    note: str = ""
    worst: float = 0.0
    held: float = 1.0


def compare_cases(cases: list[Case], plan: Plan = "auto") -> list[Outcome]:
    """Runs on every rank of a world of the meshes' size: one step of plain and parallel, every number
    compared."""
    meshes: dict[Sizes, DeviceMesh] = {}
    return [_outcome(case, plan, meshes) for case in cases]


def ep_cases(name: str) -> list[Case]:
    """A family's cases of expert parallelism: those whose variant has experts; none of a dense family."""
    return [
        (name, variant, sizes)
        for variant, sizes in EP_CASES
        if is_moe(name)
        and any("expert" in path for path, _ in tiny_model(name, variant).named_parameters())
    ]


def merged(by_rank: list[list[Outcome]]) -> list[Outcome]:
    """The worst of what the ranks found, case by case."""
    order = ("failed", "unequal", "refused", "equal")
    return [
        min(each, key=lambda o: (order.index(o.verdict), -o.worst))
        for each in zip(*by_rank, strict=True)
    ]


def refused_families(file: str = "refused.txt") -> dict[str, str]:
    """Family -> a part of the reason, from ``refused.txt``, ``refused_cp.txt`` or ``refused_ep.txt``."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    pairs = [line.split(": ", 1) for line in lines if line and not line.startswith("#")]
    return dict(pairs)


def _outcome(case: Case, plan: Plan, meshes: dict[Sizes, DeviceMesh]) -> Outcome:
    name, variant, sizes = case
    try:
        replicate, shard, *more = sizes
        cp, tp, ep = (1, *more, 1) if len(more) == 1 else (*more, 1)[:3]
        layout = MeshLayout(replicate, shard, tp, cp=cp, ep=ep)
        if sizes not in meshes:
            meshes[sizes] = build_mesh(layout, device_type="cpu")
        return _compare(name, variant, layout, meshes[sizes], plan)
    except (PlanError, StateError) as error:
        return Outcome("refused", _line(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{where.filename}:{where.lineno}"
        return Outcome("failed", f"{type(error).__name__}: {_line(error)} ({at})")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _compare(name: str, variant: str, layout: MeshLayout, mesh: DeviceMesh, plan: Plan) -> Outcome:
    plain = tiny_model(name, variant)
    parallel = copy.deepcopy(plain)
    # A plan that is spoilt on purpose is for this comparison to find.
    checks = Checks(audit=None if plan == "auto" else False)
    parallel = parallelize(parallel, mesh, tp_plan=plan, checks=checks)
    mine = layout.data_rank(dist.get_rank())
    found = _Differences()
    batches = [_batch(variant, i) for i in range(layout.data_size)]

    with AllDouble(), torch.no_grad():
        found.add("logits", _logits(plain, batches[mine]), _logits(parallel, batches[mine], mesh))
    for rank, batch in enumerate(batches):
        loss = _step(plain, batch, rank, 1 / layout.data_size)
        if rank == mine:
            expected = loss
    loss = _step(parallel, batches[mine], mine, 1.0, mesh)
    if layout.cp > 1:
        dist.all_reduce(loss, group=mesh.get_group("cp"))
        loss /= layout.cp
    found.add("loss", expected, loss)

    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for path, p, q in _pairs(plain, parallel):
        if p.grad is None or q.grad is None:
            # A parameter that nothing uses may have a zero gradient on one side, none on the other.
            one = p.grad if q.grad is None else _local(q.grad)
            if one is not None and one.any():
                found.unequal.append(f"{path}: only one side has a gradient")
            continue
        found.add_shards(f"gradient of {path}", p.grad, q.grad, scale)
    with torch.no_grad():
        for model in (plain, parallel):
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    for path, p, q in _pairs(plain, parallel):
        found.add_shards(f"weight {path}", p.detach(), q.detach(), 1.0)

    held = sum(_on_tp(q) for q in parallel.parameters()) / sum(
        p.numel() for p in plain.parameters()
    )
    verdict = "unequal" if found.unequal else "equal"
    return Outcome(verdict, "; ".join(found.unequal[:8]), found.worst, held)


def _batch(variant: str, sample: int) -> Tensor:
    generator = torch.Generator().manual_seed(sample + 1)
    return torch.randint(3, VARIANTS[variant]["vocab_size"], (2, LENGTH), generator=generator)


def _logits(model: nn.Module, batch: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    torch.manual_seed(0)
    if mesh is None or "cp" not in mesh.mesh_dim_names:
        return model(input_ids=batch, use_cache=False).logits
    inputs = cp.shard_batch({"input_ids": batch}, mesh)
    return cp.gather(model(**inputs, use_cache=False).logits, mesh, like=inputs)


def _step(
    model: nn.Module, batch: Tensor, seed: int, share: float, mesh: DeviceMesh | None = None
) -> Tensor:
    torch.manual_seed(seed)  # for models that draw which expert a token goes to
    inputs = {"input_ids": batch, "labels": batch}
    if mesh is not None:
        inputs = cp.shard_batch(inputs, mesh)
    with AllDouble():
        loss = model(**inputs, use_cache=False).loss
        (loss * share).backward()
    return loss.detach()


def plain_step(model: nn.Module, variant: str) -> Tensor:
    """The loss of one batch; leaves gradients."""
    return _step(model, _batch(variant, 0), 0, 1.0)


def _pairs(
    plain: nn.Module, parallel: nn.Module
) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    ours = dict(parallel.named_parameters(remove_duplicate=False))
    assert list(theirs) == list(ours), "the parallel model's parameter names differ"
    for path, p in theirs.items():
        yield path, p, ours[path]


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _on_tp(q: Tensor) -> float:
    """How many of a parameter's numbers a tp rank holds, on average."""
    if not isinstance(q, DTensor):
        return q.numel()
    names = q.device_mesh.mesh_dim_names or ()
    axes = zip(q.placements, names, q.device_mesh.shape, strict=True)
    return q.numel() / prod(n for p, name, n in axes if p.is_shard() and name == "tp")


class _Differences:
    """What differs, and the largest difference."""

    def __init__(self) -> None:
        self.unequal: list[str] = []
        self.worst = 0.0

    def add(self, what: str, want: Tensor, got: Tensor, scale: float = 1.0) -> None:
        """Compares one tensor with what it must be; nan is never equal."""
        got = _local(got)
        if want.shape != got.shape:
            self.unequal.append(f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
            return
        if not want.numel():
            return
        difference, largest = float((want - got).abs().max()), float(want.abs().max())
        if not difference <= OWN * largest + MODELS * scale:
            self.unequal.append(f"{what}: {difference:.2g} of {largest:.2g}")
        if largest > MODELS * scale:
            self.worst = max(self.worst, difference / largest)

    def add_shards(self, what: str, want: Tensor, got: Tensor, scale: float) -> None:
        """Compares what this rank holds of a tensor with its part of the plain one."""
        if want.shape != got.shape:
            self.unequal.append(f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
            return
        for _, box, part in shards_of(got):
            self.add(what, want[box], part, scale)
