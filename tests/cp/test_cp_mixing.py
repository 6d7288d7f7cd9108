"""What a model does along the sequence outside attention is found, and refused by name."""

import pytest
import torch
from _support.cp.models import HIDDEN, VOCABULARY, Block, Encoder
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.cp.model import ContextParallel, plan_cp
from parallel3d.errors import Parallel3dError, PlanError


class Model(nn.Module):
    """A block, and something else before it: ``how`` is called with the model and (B, S, HIDDEN)."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.table = nn.Parameter(torch.randn(64, HIDDEN))
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.conv1 = nn.Conv1d(HIDDEN, HIDDEN, 1)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.seen = nn.Buffer(torch.ones(64, 64).tril())
        self.block = Block(HIDDEN, 4)
        self.cross = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.block(self.how(self, self.embed(input_ids)))


def attend(x: Tensor, mask: Tensor) -> Tensor:
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0]


def scan(x: Tensor) -> Tensor:
    sums, total = [], torch.zeros_like(x[:, 0])
    for at in range(x.shape[1]):
        total = total + x[:, at]
        sums.append(total)
    return torch.stack(sums, 1)


def squares(m: Model, x: Tensor) -> Tensor:
    share = x.softmax(-1).mean((0, 1))
    return x + (share * share).sum()


REFUSED = {
    "arange": (
        lambda m, x: x + m.places(torch.arange(x.shape[1], device=x.device)),
        r"makes positions by arange.*'places' goes on with it by embedding.*p3d.cp.positions",
    ),
    "table": (
        lambda m, x: x + m.table[: x.shape[1]],
        "as many rows of a table as its part is long",
    ),
    "convolution": (
        lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
        r"'conv' joins neighbouring positions, by convolution.*position_wise=\(\"conv\",\)",
    ),
    "recurrence": (
        lambda m, x: m.gru(x)[0],
        "'gru' runs other operations when sequences are longer",
    ),
    "scan": (lambda m, x: scan(x), "takes some positions of the sequence, by select"),
    "last": (lambda m, x: x[:, -1:] + x, "takes some positions of the sequence, by slice"),
    "shift": (
        lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1),
        "takes some positions of the sequence, by slice",
    ),
    "prefix": (
        lambda m, x: torch.cat([m.table[:2].expand(2, -1, -1), x], 1),
        "puts something before or after one, by cat",
    ),
    "pad": (
        lambda m, x: F.pad(x, (0, 0, 0, 2)),
        "before or after the sequence, by constant_pad_nd",
    ),
    "token shift": (
        lambda m, x: x + F.pad(x, (0, 0, 1, -1)),
        "before or after the sequence, by constant_pad_nd",
    ),
    "centered": (
        lambda m, x: x - x.mean(1, keepdim=True),
        r"takes the mean over the sequence.*goes on with it by sub",
    ),
    "pooled": (
        lambda m, x: m.block.mlp(x.mean(1))[:, None],
        r"takes the mean over the sequence.*goes on with it by",
    ),
    "a loss of experts": (squares, r"takes the mean over the sequence.*by add"),
    "softmax": (lambda m, x: x.softmax(1), "computes over the sequence, by _softmax"),
    "cumsum": (lambda m, x: x.cumsum(1), "computes over the sequence, by cumsum"),
    "max": (lambda m, x: x - x.amax(1, keepdim=True), "computes over the sequence, by amax"),
    "sort": (lambda m, x: x.sort(1).values, "computes over the sequence, by sort"),
    "topk": (
        lambda m, x: x + x.topk(2, 1).values.sum(1, True),
        "computes over the sequence, by topk",
    ),
    "flip": (lambda m, x: x.flip(1), "computes over the sequence, by flip"),
    "roll": (lambda m, x: x.roll(1, 1), "computes over the sequence, by roll"),
    "fft": (lambda m, x: torch.fft.fft(x, dim=1).real, "computes over the sequence, by _fft"),
    "gather": (
        lambda m, x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
        "takes or sets some positions of the sequence, by gather",
    ),
    "batch norm": (
        lambda m, x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
        "takes statistics over the sequence",
    ),
    "chunks": (
        lambda m, x: x.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
        "neither the length nor a multiple of it",
    ),
    "by hand": (
        lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
        "by bmm.*Attention written by hand is not found: write F.scaled_dot_product_attention",
    ),
    "mixer": (
        lambda m, x: (x.transpose(1, 2) @ m.seen[: x.shape[1], : x.shape[1]]).transpose(1, 2),
        "sums over the sequence by|goes on with it by",
    ),
    "made mask": (
        lambda m, x: attend(x, torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()),
        r"gives a mask of shape \(6, 6\).*is_causal=True",
    ),
    "kept mask": (
        lambda m, x: attend(x, m.seen[: x.shape[1], : x.shape[1]].bool()),
        "gives a mask of shape",
    ),
    "distances": (
        lambda m, x: attend(x, (lambda p: (p - p[:, None]).float())(torch.arange(x.shape[1]))),
        "gives a mask of shape",
    ),
    "bias of values": (
        lambda m, x: attend(x, x[..., 0, None] - x[..., 0][:, None]),
        "compares positions with each other by",
    ),
    "not four dims": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
        r"not laid out as \(batch, heads, length, size\)",
    ),
    "other sequence": (
        lambda m, x: F.scaled_dot_product_attention(x[:, None], *[m.table[None, None]] * 2)[:, 0],
        "attends to another sequence",
    ),
    "cross": (
        lambda m, x: m.cross(x, m.table.expand(2, -1, -1), m.table.expand(2, -1, -1), None, False)[
            0
        ],
        "'cross'.*attends to another sequence",
    ),
    "weights": (lambda m, x: m.cross(x, x, x)[0], "'cross'.*call it with need_weights=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    how, message = REFUSED[case]
    with pytest.raises(PlanError, match=f"(?s)context parallelism: .*{message}"):
        plan_cp(Model(how), ContextParallel())


ALLOWED = {
    "positions": lambda m, x: x + m.places(p3d.cp.positions(m, x.shape[1], device=x.device)),
    "pointwise": lambda m, x: F.gelu(x) * x.sigmoid() + m.table[0],
    "flattened": lambda m, x: x.reshape(-1, HIDDEN).softmax(-1).view(x.shape),
    "transposed": lambda m, x: m.conv1(x.transpose(1, 2)).transpose(1, 2),
    "over features": lambda m, x: x.cumsum(-1) + x.sort(-1).values + x.flip(-1) + x.mean(-1, True),
    "routed": lambda m, x: x.view(-1, HIDDEN).topk(4, -1).values.sum(-1).view(*x.shape[:2], 1) + x,
    "constants": lambda m, x: x * torch.ones(x.shape[1], 1, device=x.device),
    "unused": lambda m, x: (torch.arange(x.shape[1]), x)[1],
    "padding": lambda m, x: attend(x, (x[..., 0] > 0)[:, None, None]),
    "padded features": lambda m, x: F.pad(x, (0, 2))[..., :HIDDEN],
    "dropout": lambda m, x: F.dropout(x, 0.5),
    "one hot": lambda m, x: x + F.one_hot(x.argmax(-1), HIDDEN),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case: str) -> None:
    plan = plan_cp(Model(ALLOWED[case]), ContextParallel())
    assert plan.attention["block"][0].kind == "sdpa"


def test_the_holder_of_attention_is_not_to_be_asserted() -> None:
    """``position_wise`` of a module around attention would hide the attention."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(REFUSED["cumsum"][0])

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids)

    with pytest.raises(PlanError, match="'inner' computes over the sequence") as info:
        plan_cp(Around(), ContextParallel())
    assert "position_wise" not in str(info.value)


def test_asserted() -> None:
    """``position_wise`` names modules that are not looked into."""
    model = Model(REFUSED["convolution"][0])
    plan = plan_cp(model, ContextParallel(position_wise=("conv",)))
    assert list(plan.attention) == ["block"]
    plan_cp(Model(REFUSED["cumsum"][0]), ContextParallel(position_wise=("",)))
    with pytest.raises(PlanError, match="position_wise 'nothing' matches no module"):
        plan_cp(model, ContextParallel(position_wise=("nothing",)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_encoder(batch_first: bool) -> None:
    """Sequence first is another layout than that of the batch, which is refused."""
    model = Encoder(batch_first=batch_first)
    if batch_first:
        plan = plan_cp(model, ContextParallel())
        assert set(plan.attention) == {"layers.0.self_attn", "layers.1.self_attn"}
    else:
        with pytest.raises(PlanError, match="laid out"):
            plan_cp(model, ContextParallel())


def test_options() -> None:
    with pytest.raises(
        Parallel3dError, match="kind is 'rings'; it must be one of 'auto', 'ulysses'"
    ):
        ContextParallel("rings")  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match="must be a tuple of names"):
        ContextParallel(position_wise="mlp")  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match="context_parallel is 3; it must be None, one of"):
        p3d.cp.model.check_options(3)


def test_examples() -> None:
    """Inputs that can't be guessed are asked for."""

    class Two(Model):
        def forward(self, features: Tensor, mask: Tensor) -> Tensor:
            return self.block(features * mask.unsqueeze(-1) @ self.table[:32])

    with pytest.raises(PlanError, match=r"could not be run on the meta device.*example="):
        plan_cp(Two(None), ContextParallel())
    example = ((torch.ones(2, 6, 32), torch.ones(2, 6)), {})
    assert "block" in plan_cp(Two(None), ContextParallel(), example).attention
