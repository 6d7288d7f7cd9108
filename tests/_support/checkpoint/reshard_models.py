"""A model with all that is hard to reshard, and what its checkpoint must bring back."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import parallel3d as p3d
from _support.packed_models import Block, PackedColumns, PackedRows
from parallel3d import MeshLayout
from parallel3d.testing import shards_of

VOCAB, DIM, HEADS, HIDDEN = 17, 8, 6, 6
Whole = dict[str, torch.Tensor]


class Odd(nn.Module):
    """Packed q, k, v and gate, up (6 heads: uneven on 4 tp ranks); 9 and 17 rows; a vocabulary of 17, padded
    in compute; a tied head; a frozen layer; buffers, one of them not to be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block(HEADS, 1, HIDDEN)])
        self.up, self.down = nn.Linear(DIM, 9), nn.Linear(9, DIM)
        self.wide, self.narrow = nn.Linear(DIM, 17), nn.Linear(17, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens))
        x = x + self.down(F.gelu(self.up(x)))
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(x + self.frozen(x))


def plan() -> dict:
    q = HEADS * 2
    return {
        "embed": "embedding",
        "layers.*.attention.qkv": PackedColumns((q, q, q), (2, 2, 2)),
        "layers.*.attention.out": PackedRows((q,), 2),
        "layers.*.mlp.gate_up": PackedColumns((HIDDEN, HIDDEN)),
        "layers.*.mlp.down": PackedRows((HIDDEN,)),
        "up": "colwise",
        "down": "rowwise",
        "wide": "colwise",
        "narrow": "rowwise",
        "head": "colwise_gather_output",
    }


def build(sizes: tuple[int, int, int], *, hfsdp: bool = False, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = Odd()
    mesh = p3d.build_mesh(MeshLayout(*sizes), device_type="cpu")
    return p3d.parallelize(model, mesh, plan(), shard_optimizer_over_replicate=hfsdp)


def adamw(model: nn.Module, kind: str = "torch") -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 2e-2}]
    if kind == "local":
        return p3d.optim.local(torch.optim.AdamW, groups)
    return torch.optim.AdamW(groups, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (2, 5), generator=generator)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.count += step


def truth(sizes: tuple[int, int, int]) -> Whole:
    """What the mesh ``sizes`` saves, whole: values of the model and of AdamW, by name."""
    generator = torch.Generator().manual_seed(sum(n << (8 * i) for i, n in enumerate(sizes)))
    found: Whole = {}
    for name, param in Odd().named_parameters():
        found[name] = torch.rand(param.shape, generator=generator)
        if param.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = torch.rand(param.shape, generator=generator)
            found[f"{name} step"] = torch.tensor(2.0)
    found["count"] = torch.randint(0, 1 << 40, (3,), generator=generator)
    found["lr"] = torch.rand(2, generator=generator, dtype=torch.float64)
    return found


def named(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Whole:
    """As they lie, by the names that ``truth`` has."""
    found = {**dict(model.named_parameters()), "count": model.count}
    for name, param in model.named_parameters():
        for key, value in (optimizer.state.get(param, {}) if optimizer else {}).items():
            found[f"{name} {key}"] = value
    return {name: t.detach() for name, t in found.items()}


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, values: Whole) -> None:
    """Writes ``values`` into the model and the optimizer, whose state is made if it isn't there."""
    for param in (param for param in model.parameters() if param.requires_grad):
        if param not in optimizer.state:
            optimizer.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param.detach()),
                "exp_avg_sq": torch.zeros_like(param.detach()),
            }
    for name, value in named(model, optimizer).items():
        for _, box, part in shards_of(value):
            part.copy_(values[name][box])
    for group, lr in zip(optimizer.param_groups, values["lr"].tolist(), strict=True):
        group["lr"] = lr


def same_parts(model: nn.Module, optimizer: torch.optim.Optimizer, want: Whole) -> None:
    """Whether this rank's parts are those of ``want``; without a collective."""
    found = named(model, optimizer)
    assert {*found, "lr"} == want.keys()
    for name, value in found.items():
        for rank, box, part in shards_of(value):
            assert part.dtype == want[name].dtype, name
            assert torch.equal(part, want[name][box]), f"{name} on rank {rank}"
    assert [group["lr"] for group in optimizer.param_groups] == want["lr"].tolist()


def same_whole(model: nn.Module, want: Whole) -> None:
    """Whether the model's values are those of ``want``, by torch's own ``full_tensor``."""
    for name, value in named(model, None).items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(found, want[name]), name
