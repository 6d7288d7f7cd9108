"""Offload of activations: the same gradients, bit for bit; the pool is never leaked; errors stay errors."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d import ActivationOffload, MeshLayout, build_mesh, parallelize
from parallel3d.activations import OffloadCounts, offload_counts
from parallel3d.activations.offload import ALIGNMENT, ATTRIBUTE, HostPool, PoolPiece
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.testing import fake_world

ALL = ActivationOffload(pool_gib=2**-6, min_kib=0)  # 16 MiB


DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]


class Dropping(nn.Module):
    """A block with attention, dropout, views of one storage and an activation in place."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(dim, dim)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x) * self.scale.to(x.dtype)
        q, k, v = self.qkv(normed).unflatten(-1, (3, 2, -1)).unbind(2)
        heads = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return x + F.dropout(self.down(heads.transpose(1, 2).flatten(2)).relu_(), 0.2)


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        self.layers = nn.ModuleList(Dropping() for _ in range(layers))
        self.head = nn.Linear(16, 19)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trained(
    kind: Any, layout: MeshLayout, plan: Any, dtype: torch.dtype, model: Callable[[], nn.Module]
) -> tuple[list[torch.Tensor], OffloadCounts | None, int]:
    """(the gradients of three steps with two micro-batches, counts, bytes left in the pool)."""
    torch.manual_seed(0)
    policy = p3d.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    built: Any = parallelize(
        model(),
        build_mesh(layout, device_type="cpu"),
        plan,
        mp_policy=policy,
        activation_checkpointing=kind,
    )
    grads = []
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        for micro in range(2):
            lm_loss(built, tokens(2 * step + micro)).backward()
        grads += [p.grad.to_local().clone() for p in built.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if kind is False:
        return grads, None, 0
    pool = vars(built.layers[0])[ATTRIBUTE].shared.pool
    return grads, offload_counts(built), pool.used


def compare(
    layout: MeshLayout, plan: Any, dtype: torch.dtype, model: Callable[[], nn.Module]
) -> None:
    plain, _, _ = trained(False, layout, plan, dtype, model)
    for settings in (ALL, ActivationOffload(pool_gib=2**-19, min_kib=0)):
        found, counts, left = trained(settings, layout, plan, dtype, model)
        assert len(plain) == len(found) and all(map(torch.equal, plain, found))
        assert counts is not None and counts.copied_out == counts.copied_back > 0 and not left
        assert bool(counts.no_room) == (settings is not ALL)
        assert counts.pool_used <= counts.pool == int(settings.pool_gib * 2**30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "plan", "model"),
    [
        (MeshLayout(2, 2, 1), None, Stack),
        (MeshLayout(1, 4, 1), None, Stack),
        (MeshLayout(4, 1, 1), None, Stack),
        (MeshLayout(1, 2, 2), LM_PLAN, Lm),
        (MeshLayout(2, 1, 2), SEQUENCE_PLAN, Lm),
    ],
    ids=["HSDP", "FSDP", "replicate", "tp", "sequence"],
)
def test_the_same_bits(
    gloo_pool: Any, layout: MeshLayout, plan: Any, model: Any, dtype: torch.dtype
) -> None:
    gloo_pool.run(compare, layout, plan, dtype, model, world_size=4)


# ---- one rank ----


@contextmanager
def stack(kind: Any = ALL, **options: Any) -> Iterator[Any]:
    with fake_world(0, 1):
        torch.manual_seed(0)
        mesh = build_mesh(MeshLayout(), device_type="cpu")
        yield parallelize(Stack(), mesh, activation_checkpointing=kind, **options)


def pool_of(model: Any) -> Any:
    return vars(model.layers[0])[ATTRIBUTE].shared.pool


def gradients(run: Callable[[Any], None], kind: Any) -> list[torch.Tensor]:
    with stack(kind) as model:
        torch.manual_seed(3)
        run(model)
        grads = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        if kind is not False:
            assert pool_of(model).used == 0
        return grads


def twice(model: Any) -> None:
    loss = lm_loss(model, tokens(0))
    loss.backward(retain_graph=True)
    loss.backward()


def earlier_last(model: Any) -> None:
    """The backward of the earlier of two forwards comes last, and of neither first."""
    losses = [lm_loss(model, tokens(i)) for i in range(3)]
    for i in (1, 2, 0):
        losses[i].backward()


def without_a_backward(model: Any) -> None:
    lm_loss(model, tokens(5))
    with torch.no_grad():
        lm_loss(model, tokens(6))
    lm_loss(model, tokens(7)).backward()


def part_of_it(model: Any) -> None:
    """A loss that the last block has no part in."""
    x = model.layers[1](model.layers[0](model.embed(tokens(0))))
    x.square().mean().backward()


@pytest.mark.parametrize("run", [twice, earlier_last, without_a_backward, part_of_it])
def test_other_orders(run: Callable[[Any], None]) -> None:
    plain, found = gradients(run, False), gradients(run, ALL)
    assert plain and all(map(torch.equal, plain, found))


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) * x)


def test_second_derivatives() -> None:
    found = []
    for kind in (False, ALL):
        with fake_world(0, 1):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.ModuleList(Smooth() for _ in range(3)))
            blocks = model[0]
            mesh = build_mesh(MeshLayout(), device_type="cpu")
            parallelize(model, mesh, activation_checkpointing=kind)
            x = torch.randn(2, 5, 16, requires_grad=True)
            loss = blocks[2](blocks[1](blocks[0](x))).square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), x)[0].clone())
            assert (kind is False) or offload_counts(model).copied_out > 0
    assert torch.equal(*found) and found[0].abs().sum() > 0


def test_a_checkpoint_of_the_users_within() -> None:
    def run(model: Any) -> None:
        block = model.layers[0]
        inner = block.down
        block.down = nn.Sequential(inner)
        block.down.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        lm_loss(model, tokens(0)).backward()

    assert all(map(torch.equal, gradients(run, False), gradients(run, ALL)))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaks_nothing(where: str) -> None:
    class Broken(Exception):
        pass

    def breaks(*_: Any) -> None:
        raise Broken

    with stack() as model:
        torch.manual_seed(3)
        block = model.layers[1]
        if where == "forward":
            handle = block.norm.register_forward_pre_hook(breaks)
        else:
            handle = block.norm.register_full_backward_hook(breaks)
        with pytest.raises(Broken):
            lm_loss(model, tokens(0)).backward()
        handle.remove()
        assert pool_of(model).used == 0
        model.zero_grad()
        torch.manual_seed(3)
        lm_loss(model, tokens(0)).backward()
        again = [p.grad.to_local().clone() for p in model.parameters()]
    plain = gradients(lambda model: lm_loss(model, tokens(0)).backward(), False)
    assert all(map(torch.equal, plain, again))


def test_what_is_moved() -> None:
    """Neither parameters nor buffers, each storage once, and nothing of the last block."""
    with stack() as model:
        lm_loss(model, tokens(0)).backward()
        rows = 2 * 5 * 16 * 4  # bytes of (2, 5, 16)
        counts = offload_counts(model)
        # Per block: x, its norm, the scaled norm, q k v in one, attention's output, the relu's, the dropout's
        # mask; numbers of rows (mean, rstd, attention's sums) are small.
        large = (3 + 3 + 1 + 1) * rows
        assert 2 * large <= counts.copied_out <= 2 * (large + 2 * rows)
    with stack(ActivationOffload(pool_gib=2**-6, min_kib=1)) as model:
        lm_loss(model, tokens(0)).backward()
        assert offload_counts(model).copied_out == 2 * 3 * rows  # q, k, v


def test_a_copy_of_the_model_and_a_pickled_setting() -> None:
    with stack() as model:
        lm_loss(model, tokens(0)).backward()
        other = copy.deepcopy(model)
        torch.manual_seed(3)
        lm_loss(other, tokens(0)).backward()
        assert pool_of(other) is pool_of(model) and pool_of(model).used == 0
        found = pickle.loads(pickle.dumps(vars(model.layers[0])[ATTRIBUTE]))
        assert found.shared.settings == ALL and found.shared.pool is None


def test_a_change_in_place_is_an_error_as_without() -> None:
    class Changes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(super().forward(x))
            y.add_(1)
            return y

    for settings in (ALL, ActivationOffload(pool_gib=0, min_kib=0)):
        with fake_world(0, 1):
            model = nn.Sequential(nn.ModuleList(Changes(16, 16) for _ in range(2)))
            mesh = build_mesh(MeshLayout(), device_type="cpu")
            parallelize(model, mesh, activation_checkpointing=settings)
            with pytest.raises(StateError, match="modified by an inplace operation"):
                model[0][0](torch.randn(2, 16)).sum().backward()


def test_parts_of_a_storage_that_change_each_by_itself() -> None:
    """As in a GRU: tensors on one storage whose version counters are not shared, and count alike."""

    class Parts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = super().forward(x).unsafe_chunk(2, -1)
            return one.sigmoid_() * other.tanh_()

    found = []
    for kind in (False, ALL):
        with fake_world(0, 1):
            torch.manual_seed(0)
            model = nn.Sequential(nn.ModuleList(Parts(16, 32) for _ in range(2)))
            parallelize(
                model, build_mesh(MeshLayout(), device_type="cpu"), activation_checkpointing=kind
            )
            x = torch.randn(2, 16, requires_grad=True)
            model[0][1](model[0][0](x)).sum().backward()
            found.append(x.grad)
    assert torch.equal(*found)


def test_counts_of_a_model_without_it() -> None:
    with (
        stack(False) as model,
        pytest.raises(StateError, match='activation_checkpointing="offload"'),
    ):
        offload_counts(model)


@pytest.mark.parametrize("name", ["pool_gib", "min_kib"])
@pytest.mark.parametrize("value", [-1, "8", True, float("nan")])
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(Parallel3dError, match=f"{name} is .*; it must be 0 or more"):
        ActivationOffload(**{name: value})


# -- the pool ------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_pieces_do_not_overlap_and_all_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    pool = HostPool(64 * ALIGNMENT, CPU, pin=False)
    held: list[PoolPiece] = []
    refused = 0
    for _ in range(400):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
            continue
        size = draw.randrange(1, 12 * ALIGNMENT)
        piece = pool.take(size)
        if piece is None:
            refused += 1
            continue
        assert piece.size >= size and piece.start + piece.size <= pool.size
        assert all(
            piece.start + piece.size <= other.start or other.start + other.size <= piece.start
            for other in held
        )
        held.append(piece)
        del piece
        assert pool.used == sum(each.size for each in held) <= pool.most_used
    assert refused
    held.clear()
    whole = pool.take(pool.size)
    assert whole is not None and pool.take(1) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_a_piece_holds_any_dtype(dtype: torch.dtype) -> None:
    pool = HostPool(4096, CPU, pin=False)
    first, second = pool.take(100), pool.take(100)
    assert first is not None and second is not None
    one, other = (each.tensor(6, dtype) for each in (first, second))
    one.fill_(1)
    other.fill_(0)
    assert one.dtype == dtype and one.shape == (6,) and bool((one == 1).all())


def test_a_pool_of_nothing_has_no_room() -> None:
    assert HostPool(0, CPU, pin=False).take(1) is None
