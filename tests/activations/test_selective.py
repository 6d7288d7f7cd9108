"""Recomputation of plain modules: the same gradients and buffers, bit for bit, and errors otherwise."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import parallel3d as p3d
from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._util.forwards import wrap_forward
from parallel3d._util.recompute import kept
from parallel3d.activations.selective import SMALL, keep_costly, partly_recomputed, recomputed
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.testing import fake_world

Policy = Callable[..., Any]
DIM = 16


def everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return False


def sums(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wanted = op.overloadpacket.__name__ in ("add", "mul", "gelu")
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE


POLICIES = {"selective": keep_costly, "everything": everything, "nothing": nothing, "sums": sums}


class Block(nn.Module):
    """Attention, dropout in three places, and an activation that writes to a linear's output."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, DIM // 2)).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop)
        x = x + F.dropout(self.out(heads.transpose(1, 2).flatten(2)), self.drop)
        return x + F.dropout(self.down(self.up(x).relu_()), self.drop)


def blocks(policy: Policy | None, dtype: torch.dtype, drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(drop) for _ in range(2))).to(dtype)
    for block in model if policy is not None else ():
        wrapped(block, policy)
    return model


def gradients(model: nn.Module, dtype: torch.dtype, times: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 6, DIM, dtype=dtype, requires_grad=True)
    loss = model(x).square().mean()
    for time in range(times):
        loss.backward(retain_graph=time < times - 1)
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g for g in (*grads, x.grad) if g is not None)]


def wrapped(module: nn.Module, policy: Policy = keep_costly) -> nn.Module:
    wrap_forward(module, partly_recomputed(policy), ("test", policy))
    return module


def check_same(
    make: Callable[[Callable[[nn.Module], nn.Module]], nn.Module],
    *policies: Policy,
    run: Callable[[nn.Module], list[torch.Tensor]] = lambda m: gradients(m, torch.float32),
) -> None:
    """``run`` of ``make(wrap)`` gives the same bits, whether ``wrap`` wraps a block or does nothing."""
    found = []
    for policy in (None, *policies):
        torch.manual_seed(0)
        wrap = (lambda module: module) if policy is None else partial(wrapped, policy=policy)
        found.append(run(make(wrap)))
    for each in found[1:]:
        assert len(each) == len(found[0]) and all(map(torch.equal, found[0], each))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits(policy: str, dtype: torch.dtype, drop: float, times: int) -> None:
    """With dropout, attention's too; ``times`` backwards of one graph."""
    plain = gradients(blocks(None, dtype, drop), dtype, times)
    found = gradients(blocks(POLICIES[policy], dtype, drop), dtype, times)
    assert len(plain) == len(found) and all(map(torch.equal, plain, found))


class Count(TorchDispatchMode):
    """Counts matmuls and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls += name in ("mm", "addmm") or ("attention" in name and "backward" not in name)
        return func(*args, **(kwargs or {}))


def test_matmuls_and_attention_are_not_computed_again() -> None:
    counts = {}
    for name, policy in {"plain": None, "selective": keep_costly, "nothing": nothing}.items():
        model = blocks(policy, torch.float32)
        loss = model(torch.randn(2, 6, DIM)).sum()
        with Count() as count:
            loss.backward()
        counts[name] = count.calls
    # Of each block qkv, attention, out and up are computed again; what comes last is needed by nobody.
    assert counts["selective"] == counts["plain"] == counts["nothing"] - 2 * 4


def test_second_derivatives() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    def make(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        return wrap(model.double())

    check_same(make, keep_costly, everything, run=run)


def test_a_checkpoint_of_the_users_within() -> None:
    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(super().forward, x * 2, use_reentrant=False)

    check_same(lambda wrap: wrap(Inner(0.2)), keep_costly)


def test_a_region_within_another() -> None:
    """The inner one's collectives are not issued again where the outer one is recomputed."""
    issued = []

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(_Sent.apply(torch.sin(super().forward(x)), issued))

    def run(model: nn.Module) -> list[torch.Tensor]:
        issued.clear()
        found = gradients(model, torch.float32)
        assert issued == ["sent"]
        return found

    check_same(
        lambda wrap: wrap(nn.Sequential(nn.Linear(DIM, DIM), wrap(Inner(DIM, DIM)))),
        keep_costly,
        run=run,
    )


class _Sent(torch.autograd.Function):
    """What a collective is to a recomputation: a function that must not be called again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, issued: list[str]) -> torch.Tensor:
        return kept("sent", lambda: (issued.append("sent"), x * 3)[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3, None


def test_no_grad_keeps_nothing() -> None:
    with torch.no_grad():
        plain = blocks(None, torch.float32)(torch.ones(1, 3, DIM))
        assert torch.equal(plain, blocks(keep_costly, torch.float32)(torch.ones(1, 3, DIM)))


def test_an_exception_ends_the_pass() -> None:
    class Raises(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.bias.numel() and x.sum() > 0:
                raise ValueError("on purpose")
            return y

    model = wrapped(Raises(DIM, DIM))
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(2, DIM))
    # Outside of a pass a collective is simply called.
    assert kept("sum", lambda: torch.ones(1)).item() == 1
    model(-torch.ones(2, DIM)).sum().backward()


def test_everything_is_freed_with_the_graph() -> None:
    model = blocks(keep_costly, torch.float32)
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "addmm":
                alive.append(weakref.ref(out.untyped_storage()))
            return out

    with collector_off():
        with Note():
            loss = model(torch.randn(2, 6, DIM)).sum()
        assert sum(ref() is not None for ref in alive) >= 4
        loss.backward()
        del loss
        assert not any(ref() is not None for ref in alive)


# ---- errors ----


def test_another_way_in_the_recomputation_is_an_error() -> None:
    class Fickle(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for _ in range(self.calls):
                x = super().forward(x)
            return torch.sin(torch.sin(torch.sin(x)))

    out = wrapped(Fickle(DIM, DIM))(torch.randn(2, DIM))  # then the linear is called twice
    with pytest.raises(StateError, match=r"differs from its forward: aten\.addmm.* 2 times, not 1"):
        out.sum().backward()


def test_other_collectives_in_the_recomputation_are_an_error() -> None:
    class Fickle(nn.Module):
        name = "gather"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = kept(self.name, lambda: x * 2)
            return torch.sin(x) * y

    model = wrapped(Fickle())
    out = model(torch.randn(2, DIM, requires_grad=True))
    model.name = "reduce"
    with pytest.raises(StateError, match="it comes to reduce, where the forward had gather"):
        out.sum().backward()


def test_what_is_changed_after_the_block_is_an_error() -> None:
    class Ends(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return y, torch.sin(y)

    y, sine = wrapped(Ends(DIM, DIM))(torch.randn(2, DIM))
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(
        StateError, match=r"changed in place after its block's forward; change a copy"
    ):
        sine.sum().backward()


@pytest.mark.parametrize("policy", [None, keep_costly])
def test_a_block_that_changes_what_it_has_saved_is_an_error(policy: Policy | None) -> None:
    class Changes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(super().forward(x))
            y.add_(1)
            return torch.tanh(y)

    model = Changes(DIM, DIM)
    wrapper = recomputed if policy is None else partly_recomputed(policy)
    wrap_forward(model, wrapper, ("test", policy))
    with pytest.raises(StateError, match=r"\(2, 16\) torch.float32, is modified by an inplace"):
        model(torch.randn(2, DIM)).sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_within_the_forward(policy: str) -> None:
    class Slope(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(super().forward(at)).sum(), at)
            return torch.sin(super().forward(x)) * slope

    check_same(lambda wrap: wrap(Slope(DIM, DIM)), POLICIES[policy])


class AddsInPlace(nn.Linear):
    """Takes its input by keyword, in a tuple or in a dict, and adds to it."""

    def forward(self, x: Any) -> torch.Tensor:
        x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        x += torch.tanh(super().forward(x * 2))
        return x


@pytest.mark.parametrize("policy", [None, keep_costly])
@pytest.mark.parametrize("how", ["positional", "keyword", "tuple", "dict"])
def test_an_input_that_the_block_changes_is_an_error(how: str, policy: Policy | None) -> None:
    """Recomputed from the changed input, gradients would be other ones."""
    model = AddsInPlace(DIM, DIM)
    wrapper = recomputed if policy is None else partly_recomputed(policy)
    wrap_forward(model, wrapper, ("test", policy, how))
    x = torch.randn(2, DIM, requires_grad=True) * 1
    given = {"tuple": (x,), "dict": {"x": x}}.get(how, x)
    out = model(x=given) if how == "keyword" else model(given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_random_state_of_the_device_of_a_keyword_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch saves it for the devices of positional tensors alone."""
    seen: list[Any] = []
    real = torch.utils.checkpoint._infer_device_type
    monkeypatch.setattr(
        "torch.utils.checkpoint._infer_device_type",
        lambda *args: (seen.append(args), real(*args))[1],
    )
    model, x = AddsInPlace(DIM, DIM), torch.randn(2, DIM)
    wrap_forward(model, recomputed, ("test", "device"))
    model(x={"x": x})
    assert any(each is x for each in seen[0])


@pytest.mark.parametrize("answer", [None, "save", CheckpointPolicy.PREFER_RECOMPUTE.value + 90])
def test_what_a_policy_returns_is_checked(answer: Any) -> None:
    model = wrapped(nn.Linear(DIM, DIM), lambda ctx, op, *args, **kwargs: answer)
    with pytest.raises(
        Parallel3dError, match=r"returned .* for aten\..*PREFER_SAVE, MUST_RECOMPUTE"
    ):
        model(torch.randn(2, DIM, requires_grad=True))


class Doubling:
    """Doubles what one layer puts out, within its body."""

    def __init__(self, layer: nn.Module, before: bool) -> None:
        self.layer, self.before = layer, before

    def __enter__(self) -> None:
        if self.before:
            self.handle = self.layer.register_forward_pre_hook(
                lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
            )
        else:
            self.handle = self.layer.register_forward_hook(lambda module, args, output: 2 * output)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_hooks_of_one_forward_are_there_in_its_recomputation(kind: str, before: bool) -> None:
    def run(wrapped: bool) -> list[Any]:
        model = blocks(None, torch.float32)
        for block in model if wrapped else ():
            wrapper = recomputed if kind == "full" else partly_recomputed(keep_costly)
            wrap_forward(block, wrapper, ("hooks", kind))
        x = torch.ones(2, 6, DIM)
        with Doubling(model[0].down, before):
            first = model(x)
        later = model(x)  # without
        (first.square().mean() + later.mean()).backward()
        hooks = model[0].down._forward_pre_hooks, model[0].down._forward_hooks
        assert not any(hooks) and not model[0].down._forward_pre_hooks_with_kwargs
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


# -- blocks whose forward changes buffers --------------------------------------------------------------


WIDTH = 6


def keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Copies too: those that are made of buffers are no operations of the block."""
    return CheckpointPolicy.MUST_SAVE


WRAPPERS = {
    "full": recomputed,
    "selective": partly_recomputed(keep_costly),
    "policy": partly_recomputed(keep_all),
}


class Normed(nn.Module):
    """Statistics that torch updates without a change of their version counters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


class Spectral(nn.Module):
    """The weight depends on buffers that each forward improves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Codebook(nn.Module):
    """Reads a buffer, then changes it in place; ``size`` rows."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.linspace(-1, 1, size * WIDTH).view(size, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * (1 + self.codes.clone()[:3].sum())
        self.update(y.detach())
        return y

    def update(self, y: torch.Tensor) -> None:
        self.codes.mul_(0.9).add_(0.1 * y.mean(0))


class Assigned(Codebook):
    """The buffer becomes another tensor."""

    def update(self, y: torch.Tensor) -> None:
        self.codes = 0.9 * self.codes + 0.1 * y.mean(0)


class Counting(Codebook):
    """Two modules share a buffer that counts, and it says how far the codes move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear.register_buffer("count", self.count)

    def update(self, y: torch.Tensor) -> None:
        self.linear.count += 1
        self.codes.lerp_(y.mean(0).expand_as(self.codes), 1 / float(self.count + 1))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Normed,
    "cumulative batch norm": lambda: Normed(momentum=None),
    "spectral norm": Spectral,
    "codes": Codebook,
    "large codes": lambda: Codebook(SMALL // WIDTH),
    "assigned": Assigned,
    "shared": Counting,
}


def pair(block: Callable[[], nn.Module], how: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block()).double()
    model = copy.deepcopy(plain)
    for each in model:
        wrap_forward(each, WRAPPERS[how], how)
    return plain, model


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, got), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, want), name
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad), name


@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize("block", BLOCKS)
def test_steps(block: str, how: str) -> None:
    plain, model = pair(BLOCKS[block], how)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            each(batch(step)).square().mean().backward()
            optimizer.step()
    assert_same(model, plain)


@pytest.mark.parametrize("block", BLOCKS)
def test_two_forwards_before_their_backwards(block: str) -> None:
    """Each recomputation starts from what its own forward has seen; the first backward comes twice."""
    plain, model = pair(BLOCKS[block], "full")
    for each in (plain, model):
        losses = [each(batch(step)).square().mean() for step in range(2)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        each.eval()
        each(batch(2)).sum().backward()
    assert_same(model, plain)


def test_statistics_that_are_frozen_at_first() -> None:
    plain, model = pair(Normed, "full")
    for each in (plain, model):
        for step in range(4):
            each.train(step % 2 == 1)
            each(batch(step)).square().mean().backward()
    assert_same(model, plain)


def test_an_exception_in_the_recomputation_leaves_the_buffers() -> None:
    _, model = pair(Counting, "full")
    loss = model(batch(0)).sum()
    before = [buffer.clone() for buffer in model.buffers()]

    def broken(*_: Any) -> None:
        raise ArithmeticError

    handle = model[1].linear.register_forward_hook(broken)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    assert all(map(torch.equal, model.buffers(), before))


class Seldom(Codebook):
    def update(self, y: torch.Tensor) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 3:
            super().update(y)


def test_a_large_buffer_that_is_changed_late() -> None:
    """There is no copy of it: an error, not other gradients."""
    block = Seldom(SMALL // WIDTH)
    wrap_forward(block, recomputed, "full")
    for _ in range(3):
        loss = block(torch.ones(4, WIDTH)).sum()
    with pytest.raises(
        StateError, match=r"buffer codes of a Seldom.*activation_checkpointing=False"
    ):
        loss.backward()


def test_blocks_without_buffers_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("parallel3d.activations.selective.Buffers", made)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    wrap_forward(block, recomputed, "full")
    block(torch.ones(2, WIDTH)).sum().backward()


KINDS = {"full": True, "selective": "selective", "offload": "offload", "policy": keep_all}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_of_parallel_models(kind: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Normed(), Spectral(), Codebook())
    model = copy.deepcopy(plain)
    with fake_world(0, 1):  # simulated ranks would share the buffers
        mesh = p3d.build_mesh(p3d.MeshLayout(), device_type="cpu")
        p3d.parallelize(model, mesh, units=["*"], activation_checkpointing=kind)
        for each in (plain, model):
            for step in range(2):
                each(batch(step).float()).square().mean().backward()
        for got, want in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(got, want)
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


def test_cast_buffers() -> None:
    """The statistics of a unit with ``buffer_dtype`` are those without recomputation."""
    found = []
    for kind in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Normed(), Codebook())
        with fake_world(0, 1):
            mesh = p3d.build_mesh(p3d.MeshLayout(), device_type="cpu")
            policy = p3d.MixedPrecisionPolicy(buffer_dtype=torch.bfloat16)
            p3d.parallelize(
                model, mesh, units=["*"], activation_checkpointing=kind, mp_policy=policy
            )
            for step in range(3):
                model(batch(step).float()).square().mean().backward()
            found.append([buffer.clone() for buffer in model.buffers()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
