"""VocabLogits: whatever is done with them gives what the plain logits give, with its gradients."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from _support.tp.tp_world import chunks, same, tp_mesh
from torch import Tensor
from torch.nn import functional as F

from parallel3d.errors import StateError
from parallel3d.testing.worlds import local_world
from parallel3d.tp import TpAxis, VocabLogits
from parallel3d.tp.vocab_parallel import vocab_logits
from parallel3d.tp.vocab_parallel.vocab_logits import lazy_logits, sharded_logits

VOCAB, WIDTH = 7, 3
TARGET = torch.tensor([[1, 6, -100, 0], [3, 4, 5, 2]])
MASK = torch.tensor([[True, False, True, True], [False, True, True, False]])


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS = rand(2, 4, VOCAB)
SOFT = rand(2, VOCAB, 4).softmax(1)
WEIGHT = rand(VOCAB, seed=3).abs()
SCALE = torch.tensor(0.5, dtype=torch.float64)

# What stays split: with a loss or a gather after it.
STAYS = {
    "itself": lambda l: l,
    "float": lambda l: l.float(),
    "to a dtype": lambda l: l.to(torch.float32).to(dtype=torch.float64),
    "to where it is": lambda l: l.to("cpu"),
    "next token": lambda l: l[..., :-1, :],
    "rows by slices": lambda l: l[:, -2:, :],
    "rows by number": lambda l: l[1],
    "last token": lambda l: l[:, -1, :],
    "a row": lambda l: l[1, 2],
    "a mask of rows": lambda l: l[MASK],
    "rows by index": lambda l: l[torch.tensor([1, 0, 1]), torch.tensor([3, 3, 3])],
    "a new dim": lambda l: l[:, None],
    "all": lambda l: l[...],
    "view": lambda l: l.view(-1, VOCAB),
    "view by tuple": lambda l: l.view((8, -1)),
    "reshape": lambda l: l.reshape(4, 2, VOCAB),
    "torch.reshape": lambda l: torch.reshape(l, (-1, VOCAB)),
    "flatten": lambda l: l.flatten(0, 1),
    "torch.flatten": lambda l: torch.flatten(l, end_dim=-2),
    "slice, contiguous, view": lambda l: l[..., :-1, :].contiguous().view(-1, VOCAB),
    "slice, reshape": lambda l: l[:, 1:].reshape(-1, VOCAB),
    "transpose": lambda l: l.transpose(1, 2),
    "transpose rows": lambda l: l.transpose(0, 1),
    "permute": lambda l: l.permute(1, 2, 0),
    "transpose and back": lambda l: l.transpose(1, 2).permute(0, 2, 1),
    "scaled": lambda l: l * 0.25,
    "scaled from the left": lambda l: 2 * l,
    "divided": lambda l: l / 3,
    "scaled by a buffer": lambda l: l * SCALE,
    "softcapped": lambda l: torch.tanh(l / 3.0) * 3.0,
    "softcapped by methods": lambda l: l.div(3.0).tanh().mul(3.0),
    "shifted": lambda l: 1 - (l + 2),
    "clamped": lambda l: l.clamp(-0.5, 0.5),
    "negated": lambda l: -l,
    "cloned": lambda l: l.clone(),
}
LOSSES = {
    "flat": lambda l: F.cross_entropy(l.view(-1, VOCAB), TARGET.view(-1)),
    "shifted": lambda l: F.cross_entropy(l[:, :-1].flatten(0, 1), TARGET[:, 1:].flatten()),
    "module": lambda l: torch.nn.CrossEntropyLoss(WEIGHT, reduction="sum")(
        l.flatten(0, 1), TARGET.flatten()
    ),
    "classes at dim 1": lambda l: F.cross_entropy(l.transpose(1, 2), TARGET, reduction="none"),
    "by name": lambda l: F.cross_entropy(
        input=l.permute(0, 2, 1), target=TARGET.clamp(0), ignore_index=3, label_smoothing=0.1
    ),
    "softcapped": lambda l: F.cross_entropy(
        (torch.tanh(l / 3) * 3)[..., :-1, :].reshape(-1, VOCAB), TARGET[:, 1:].reshape(-1)
    ),
    "two of the same": lambda l: (
        F.cross_entropy(l.flatten(0, 1), TARGET.flatten())
        + F.cross_entropy((l * 2)[MASK], TARGET[MASK], reduction="sum")
    ),
}


def written(l: Tensor) -> Tensor:
    """A view of a view is written to: all of them show it, what was computed before does not."""
    before, rows = l * 2, l[:, 1:]
    rows.view(2, 3, VOCAB)[:, :, 2] = 1.5
    l *= 3
    return torch.cat([before.flatten(), l.flatten(), rows.flatten()])


class Unaware(torch.autograd.Function):
    """Somebody's function, which __torch_function__ does not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp().sum(-1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * x.exp()


def hooked(l: Tensor) -> Tensor:
    l.register_hook(lambda grad: grad * 2)
    return F.cross_entropy((l / 2).flatten(0, 1), TARGET.flatten()) + l.square().sum()


def retained(l: Tensor) -> Tensor:
    l.retain_grad()
    F.cross_entropy((l / 2).flatten(0, 1), TARGET.flatten()).backward(retain_graph=True)
    return l * l.grad


def read(l: Tensor, f, mode) -> Tensor:
    with mode():
        f(l)
    return LOSSES["flat"](l)


GATHERS = {
    "read as data without a graph": lambda l: read(l, lambda l: l.data.max(), torch.no_grad),
    "read in inference mode": lambda l: read(l, lambda l: l.argmax(-1), torch.inference_mode),
    "a view read without a graph": lambda l: read(l, lambda l: l[:, 1:].data, torch.no_grad),
    "written to without a graph": lambda l: (read(l, lambda l: l.mul_(2), torch.no_grad), l)[1] * l,
    "softmax": lambda l: l.softmax(-1),
    "log-probabilities": lambda l: F.nll_loss(F.log_softmax(l, -1).flatten(0, 1), TARGET.flatten()),
    "largest": lambda l: l.max(-1).values,
    "argmax": lambda l: l.argmax(-1).double(),
    "some classes": lambda l: l[..., 2:5],
    "a mask of classes": lambda l: l[l > 0],
    "joined": lambda l: torch.cat([l, l], 0),
    "stacked rows": lambda l: torch.stack([l[0], l[1]]),
    "a bias of classes": lambda l: l + WEIGHT,
    "learned scale": lambda l: l * SCALE.clone().requires_grad_(),
    "view without the vocabulary": lambda l: l.view(2, -1),
    "sum": lambda l: l.sum(),
    "split and unsplit": lambda l: torch.tanh(l).square().softmax(-1)[:, 1:],
    "of probabilities": lambda l: F.cross_entropy(l.transpose(1, 2), SOFT),
    "written to": written,
    "masked in place": lambda l: l.masked_fill_(~MASK.unsqueeze(-1), 0.0),
    "a row written to": lambda l: (l[0].zero_(), l)[1] * 1.0,
    "unaware": Unaware.apply,
    "hooked": hooked,
    "retained": retained,
    "detached": lambda l: l.detach() * l,
    "loss and values": lambda l: LOSSES["flat"](l) + l.exp().sum(),
}


class Case:
    """Logits of simulated ranks, or whole ones, beside the plain logits they stand for."""

    def __init__(self, kind: str, tp: int, world=None) -> None:
        self.world, self.tp = world, tp
        with world.paused():
            self.hidden, self.head = rand(2, 4, WIDTH), rand(VOCAB, WIDTH, seed=1)
        self.axis = TpAxis(tp_mesh(tp)["tp"]) if tp > 1 else None
        self.inputs = [
            world.map(lambda r: rand(2, 4, WIDTH)),
            world.map(lambda r: chunks(rand(VOCAB, WIDTH, seed=1), 0, tp)[r]),
        ]
        for x in self.inputs:
            x.requires_grad_()
        if kind == "lazy":
            self.logits = lazy_logits(*self.inputs, None, VOCAB, self.axis, tokens=3)
        else:
            self.logits = sharded_logits(F.linear(*self.inputs), VOCAB, self.axis)

    def compare(self, f) -> None:
        hidden, head = self.hidden.requires_grad_(), self.head.requires_grad_()
        with self.world.paused():
            wanted = f(F.linear(hidden, head))
            weight = rand(*wanted.shape, seed=9)
            if wanted.requires_grad:
                (wanted * weight).sum().backward()
        got = f(self.logits)
        assert got.shape == wanted.shape
        assert got.dtype is wanted.dtype
        if isinstance(got, VocabLogits):
            got = got.full_tensor()
        for each in self.world.per_rank(got):
            torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-10)
        assert got.requires_grad == wanted.requires_grad
        if not wanted.requires_grad:
            return
        (got * weight).sum().backward()
        # The gradient of what ranks hold copies of is in parts, as copy_to_tp expects it.
        tolerance = 1e-6 if wanted.dtype is torch.float32 else 1e-10
        grad = sum(self.world.per_rank(self.inputs[0].grad)[: self.tp])
        torch.testing.assert_close(grad, hidden.grad, rtol=tolerance, atol=tolerance)
        grad = torch.cat(self.world.per_rank(self.inputs[1].grad)[: self.tp])
        torch.testing.assert_close(grad, head.grad, rtol=tolerance, atol=tolerance)


@pytest.fixture
def gathers(monkeypatch):
    """The shapes of what is gathered."""
    shapes = []
    inner = vocab_logits._gathered
    monkeypatch.setattr(
        vocab_logits, "_gathered", lambda x, view: (shapes.append(view.shape), inner(x, view))[1]
    )
    return shapes


@pytest.mark.parametrize(("kind", "tp"), [("split", 2), ("lazy", 2)])
@pytest.mark.parametrize("name", STAYS)
def test_stays_split(name, kind, tp, gathers):
    with local_world(tp) as world:
        case = Case(kind, tp, world)
        result = STAYS[name](case.logits)
        assert isinstance(result, VocabLogits)
        assert not gathers
        case.compare(STAYS[name])


@pytest.mark.parametrize(("kind", "tp"), [("split", 4), ("lazy", 2), ("lazy", 1)])
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy_does_not_gather(name, kind, tp, gathers):
    with local_world(tp) as world:
        Case(kind, tp, world).compare(LOSSES[name])
    assert not gathers


@pytest.mark.parametrize(("kind", "tp"), [("split", 2), ("lazy", 1)])
@pytest.mark.parametrize("name", GATHERS)
def test_gathers_and_goes_on(name, kind, tp):
    with local_world(tp) as world:
        Case(kind, tp, world).compare(GATHERS[name])


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients(grad, gathers):
    with local_world(2) as world, grad():
        local = world.map(lambda r: chunks(LOGITS, 2, 2)[r])
        logits = sharded_logits(local, VOCAB, TpAxis(tp_mesh(2)["tp"]))
        next_ids = logits[:, -1, :].to(torch.float32, copy=True).argmax(-1)
        assert gathers == [(2, VOCAB)]  # of the last token alone
        for got in world.per_rank(next_ids):
            assert torch.equal(got, LOGITS[:, -1].argmax(-1))
        logits[:, 0].fill_(1.0)
        for got in world.per_rank(logits.full_tensor()):
            assert (got[:, 0] == 1).all()
            same(got[:, 1:], LOGITS[:, 1:])


def whole() -> VocabLogits:
    return sharded_logits(rand(2, VOCAB), VOCAB, None)


def test_copies_and_files_are_plain():
    logits = whole()
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    for copied in (torch.load(file), pickle.loads(pickle.dumps(logits)), copy.deepcopy(logits)):
        assert type(copied) is Tensor
        same(copied, rand(2, VOCAB))
    same(torch.from_numpy(logits.numpy()), rand(2, VOCAB))
    assert logits.tolist() == rand(2, VOCAB).tolist()


def test_what_it_says_of_itself():
    logits = whole()
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.size(-1), logits.dim(), len(logits)) == ((2, VOCAB), VOCAB, 2, 2)
    assert logits.dtype is torch.float64
    assert logits.device == torch.device("cpu")
    assert not logits.requires_grad


def test_showing_it_does_not_communicate(gathers):
    """It may happen on one rank only, which would then wait for the others."""
    logits = whole()
    assert repr(logits) == str(logits) == f"{logits}"
    assert "VocabLogits(shape=(2, 7), dtype=torch.float64" in repr(logits)
    assert not gathers


def test_written_to_and_given_to_a_function_that_can_not_see_it():
    logits = sharded_logits(rand(2, VOCAB).requires_grad_(), VOCAB, None)
    logits *= 2
    with pytest.raises(StateError, match="written to in place"):
        Unaware.apply(logits).sum().backward()


def test_what_is_written_to_a_plain_tensor_of_it_shows():
    for share in (lambda l: l.data, lambda l: l.detach(), lambda l: torch.from_numpy(l.numpy())):
        logits = whole()
        share(logits)[:, 1] = 5.0
        assert (logits[:, 1] == 5).all()
        assert logits.softmax(-1)[0, 1] > 0.5


def test_a_scale_that_changes_later_does_not_change_what_was_computed():
    scale = torch.tensor(2.0, dtype=torch.float64)
    scaled = whole() * scale
    scale.fill_(100.0)
    same(scaled.full_tensor(), rand(2, VOCAB) * 2)


def test_autocast_computes_the_loss_in_float32():
    hidden, head = torch.randn(6, 4).requires_grad_(), torch.randn(VOCAB, 4).requires_grad_()
    target = torch.arange(6)
    losses = []
    for make in (
        lambda: F.linear(hidden, head),
        lambda: sharded_logits(F.linear(hidden, head), VOCAB, None),
        lambda: lazy_logits(hidden, head, None, VOCAB, None, tokens=4),
    ):
        hidden.grad = head.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(make(), target)
        assert loss.dtype is torch.float32
        loss.backward()
        losses.append((loss.detach(), hidden.grad, head.grad))
    for got in losses[1:]:
        for a, b in zip(got, losses[0], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_a_backward_frees_what_it_needed_though_the_loss_lives_on():
    logits = sharded_logits(rand(2, VOCAB).requires_grad_() * 1, VOCAB, None)
    rows = weakref.ref(logits._view.rows)
    loss = F.cross_entropy((logits / 2)[:, :], torch.tensor([1, 2]))
    del logits
    loss.backward(retain_graph=True)
    assert rows() is not None
    loss.backward()
    assert rows() is None
    with pytest.raises(RuntimeError, match="backward was called a second time"):
        loss.backward()


@pytest.mark.parametrize("f", [LOSSES["flat"], lambda l: l.full_tensor().square().sum()])
def test_a_compiled_loss_has_its_gradient(f):
    """Traced into, our nodes ran without a graph."""
    x = rand(2, 4, VOCAB).requires_grad_()
    wanted = f(sharded_logits(x, VOCAB, None))
    torch.compiler.reset()
    got = torch.compile(f, backend="eager")(sharded_logits(x, VOCAB, None))
    assert got.requires_grad
    same(torch.autograd.grad(got, x)[0], torch.autograd.grad(wanted, x)[0])
