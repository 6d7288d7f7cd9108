"""Selective recomputation of plain modules: the same gradients, bit for bit, and errors where it can't be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._util.forwards import wrap_forward
from parallel3d._util.recompute import kept
from parallel3d.activations.selective import keep_costly, partly_recomputed, recomputed
from parallel3d.errors import Parallel3dError, StateError

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
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.block, x * 2, use_reentrant=False)

    check_same(lambda wrap: wrap(Inner()), keep_costly)


def test_a_region_within_another() -> None:
    """The inner one's collectives are not issued again where the outer one is recomputed."""
    issued = []

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(_Sent.apply(torch.sin(self.linear(x)), issued))

    def run(model: nn.Module) -> list[torch.Tensor]:
        issued.clear()
        found = gradients(model, torch.float32)
        assert issued == ["sent"]
        return found

    check_same(
        lambda wrap: wrap(nn.Sequential(nn.Linear(DIM, DIM), wrap(Inner()))), keep_costly, run=run
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

    gc.collect()
    gc.disable()
    try:
        with Note():
            loss = model(torch.randn(2, 6, DIM)).sum()
        assert sum(ref() is not None for ref in alive) >= 4
        loss.backward()
        del loss
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


# ---- errors ----


def test_another_way_in_the_recomputation_is_an_error() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(DIM, DIM), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for _ in range(self.calls):
                x = self.linear(x)
            return torch.sin(torch.sin(torch.sin(x)))

    out = wrapped(Fickle())(torch.randn(2, DIM))  # and the recomputation calls the linear twice
    with pytest.raises(StateError, match=r"differs from its forward: aten\.addmm.* 2 times, not 1"):
        out.sum().backward()


def test_other_collectives_in_the_recomputation_are_an_error() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.name = "gather"

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
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            return y, torch.sin(y)

    y, sine = wrapped(Ends())(torch.randn(2, DIM))
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(
        StateError, match=r"changed in place after its block's forward; change a copy"
    ):
        sine.sum().backward()


@pytest.mark.parametrize("policy", [None, keep_costly])
def test_a_block_that_changes_what_it_has_saved_is_an_error(policy: Policy | None) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(self.linear(x))
            y.add_(1)
            return torch.tanh(y)

    model = Changes()
    wrap_forward(
        model, recomputed if policy is None else partly_recomputed(policy), ("test", policy)
    )
    with pytest.raises(StateError, match=r"\(2, 16\) torch.float32, is modified by an inplace"):
        model(torch.randn(2, DIM)).sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_within_the_forward(policy: str) -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(at)).sum(), at)
            return torch.sin(self.linear(x)) * slope

    check_same(lambda wrap: wrap(Slope()), POLICIES[policy])


class AddsInPlace(nn.Module):
    """Takes its input by keyword, in a tuple or in a dict, and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Any) -> torch.Tensor:
        x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        x += torch.tanh(self.linear(x * 2))
        return x


@pytest.mark.parametrize("policy", [None, keep_costly])
@pytest.mark.parametrize("how", ["positional", "keyword", "tuple", "dict"])
def test_an_input_that_the_block_changes_is_an_error(how: str, policy: Policy | None) -> None:
    """Recomputed from the changed input, gradients would be other ones."""
    model = AddsInPlace()
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
    model, x = AddsInPlace(), torch.randn(2, DIM)
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
