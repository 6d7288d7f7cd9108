"""A deleted model is gone at once, without the garbage collector."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from _support.fsdp.lifetimes import References, collector_off, references
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, fsdp, parallelize
from parallel3d.fsdp import BackwardPrefetch, CommHookState, bf16_compress_hook
from parallel3d.optim import accumulate, clip_grad_norm_
from parallel3d.testing import fake_world

HSDP = MeshLayout(2, 2, 1)
FSDP = MeshLayout(1, 4, 1)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Boom(Exception):
    pass


def explode(*_: object) -> None:
    raise Boom


def sharded(layout: MeshLayout = HSDP, build: Callable[[], nn.Module] = Lm, **options) -> nn.Module:
    """Each block and the root are units."""
    return shard_blocks(build(), build_mesh(layout, device_type="cpu"), **options)


def tensor_parallel(**options) -> nn.Module:
    return parallelize(Lm(vocab=20), cpu_mesh(1, 2, 2), LM_PLAN, **options)


def loss_of(model: nn.Module, index: int = 0) -> torch.Tensor:
    return lm_loss(model, tokens(index))


def fail_in_forward(model: nn.Module) -> None:
    handle = model.layers[1].up.register_forward_pre_hook(explode)
    with contextlib.suppress(Boom):
        loss_of(model)
        pytest.fail("nothing was raised")
    handle.remove()


def fail_in_backward(model: nn.Module) -> None:
    handle = model.layers[1].register_full_backward_hook(explode)
    with contextlib.suppress(Boom):
        loss_of(model).backward()
        pytest.fail("nothing was raised")
    handle.remove()


class Checkpointed(Lm):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class Buffered(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(12))


class WithMethod(Lm):
    def embed_only(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


def lora() -> nn.Module:
    model = Lm()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model


def modules_as_one_unit() -> nn.Module:
    model = Lm()
    mesh = build_mesh(FSDP, device_type="cpu")
    fsdp.fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    return shard_blocks(model, mesh)


def root_only() -> nn.Module:
    return fsdp.fully_shard(Lm(), mesh=build_mesh(FSDP, device_type="cpu"))


# What is done to a model, whose references are taken afterwards. May return references to more.


def train(model: nn.Module) -> None:
    """The second step prefetches."""
    for index in range(2):
        loss_of(model, index).backward()


def without_grad(model: nn.Module) -> None:
    with torch.no_grad():
        loss_of(model)


def optimizer_steps(model: nn.Module) -> References:
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(2):
        loss_of(model, index).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    return {
        f"{key} of {i}": weakref.ref(value)
        for i, values in enumerate(optimizer.state.values())
        for key, value in values.items()
    }


def optimizer_that_is_gone(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def all_reduce_put_off(model: nn.Module) -> None:
    model.set_requires_all_reduce(False)
    train(model)


def sync_put_off(model: nn.Module) -> None:
    model.set_requires_gradient_sync(False)
    train(model)


def hook_and_schedule(model: nn.Module) -> None:
    """Also prefetches that were put off, in a forward whose backward doesn't come."""
    model.register_comm_hook(CommHookState(), bf16_compress_hook)
    model.set_limit_all_gathers(1)
    model.set_backward_prefetch(BackwardPrefetch.BACKWARD_POST)
    model.layers[0].set_modules_to_forward_prefetch(list(model.layers[1:]))
    model.layers[-1].set_modules_to_backward_prefetch(list(model.layers[:-1]))
    train(model)
    loss_of(model)


def half_way_through_accumulate(model: nn.Module) -> None:
    batches = accumulate(model, range(3))
    loss_of(model, next(batches)).backward()
    batches.close()


def unshard(model: nn.Module) -> None:
    model.unshard()
    model.layers[0].unshard(async_op=True)


def block_alone(model: nn.Module) -> None:
    model.layers[0](torch.randn(2, 12)).sum().backward()
    train(model)


def convert(model: nn.Module) -> None:
    train(model)
    model.double()
    train(model)


def load(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict(), assign=True)
    train(model)


def whole_tensors(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    with fsdp.full_params(model, with_grads=True):
        pass
    optimizer.step()
    with fsdp.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT):
        model.load_state_dict(model.state_dict())
        fsdp.load_optim_state_dict(model, optimizer, fsdp.optim_state_dict(model, optimizer))
    fsdp.set_state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT)


def reset(model: nn.Module) -> None:
    fail_in_backward(model)
    model.reset_iter_state()
    train(model)


def all_reduce_hook(model: nn.Module) -> None:
    model.layers[0].set_all_reduce_hook(lambda gradient: None)
    train(model)


def forward_method(model: nn.Module) -> None:
    fsdp.register_fsdp_forward_method(model, "embed_only")
    model.embed_only(tokens(0)).sum().backward()
    train(model)


def shared_context(model: nn.Module) -> References:
    second = sharded()
    fsdp.share_comm_ctx([model, second])
    train(model)
    train(second)
    return {f"second's {name}": ref for name, ref in references(second).items()}


def copied(model: nn.Module) -> References:
    """An EMA's way to make one."""
    train(model)
    average = copy.deepcopy(model)
    train(average)
    return {f"copy's {name}": ref for name, ref in references(average).items()}


def made(**options) -> Callable[[], nn.Module]:
    return partial(sharded, **options)


Act = Callable[[nn.Module], object]
LIVES: dict[str, tuple[Callable[[], nn.Module], Act]] = {
    "constructed": (sharded, lambda model: None),
    "constructed with a buffer": (made(build=Buffered), lambda model: None),
    "forward": (sharded, loss_of),
    "forward without grad": (sharded, without_grad),
    "steps": (sharded, train),
    "optimizer steps": (sharded, optimizer_steps),
    "optimizer that is gone": (sharded, optimizer_that_is_gone),
    "mixed precision": (made(mp_policy=MIXED), train),
    "frozen parts": (made(build=lora), train),
    "tied": (made(build=partial(Lm, tied=True)), train),
    "all-reduce put off": (sharded, all_reduce_put_off),
    "sync put off": (sharded, sync_put_off),
    "a hook and a schedule": (made(build=partial(Lm, layers=4)), hook_and_schedule),
    "half-way through accumulate": (sharded, half_way_through_accumulate),
    "unsharded by hand": (sharded, unshard),
    "root only": (root_only, train),
    "modules as one unit": (modules_as_one_unit, train),
    "a block run alone": (sharded, block_alone),
    "conversion": (sharded, convert),
    "loading": (sharded, load),
    "full_params and state dicts": (sharded, whole_tensors),
    "an exception in forward": (sharded, fail_in_forward),
    "an exception in backward": (sharded, fail_in_backward),
    "reset_iter_state": (sharded, reset),
    "checkpointed": (made(build=Checkpointed), train),
    "parallelized": (tensor_parallel, train),
    "parallelized, checkpointed": (partial(tensor_parallel, activation_checkpointing=True), train),
    "an all-reduce hook": (made(layout=FSDP), all_reduce_hook),
    "a forward method": (made(build=WithMethod), forward_method),
    "a shared context": (sharded, shared_context),
    "resharded to a smaller world": (made(layout=FSDP, reshard_after_forward=2), train),
    "offloaded": (made(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)), train),
    "copied": (sharded, copied),
}


def check_gone(found: References) -> None:
    left = [name for name, reference in found.items() if reference() is not None]
    assert not left, f"{len(left)} of {len(found)} are alive: {', '.join(left[:12])}, ..."


@pytest.mark.parity("reliability: everything freed at once")
@pytest.mark.parametrize("life", LIVES)
def test_freed_at_once(life: str) -> None:
    """Modules, Parameters, buffers, gradients, units and storage, as soon as the model's name is gone."""
    make, act = LIVES[life]
    with fake_world(0, 4), collector_off():
        model = make()
        more = act(model)
        found = references(model) | (more if isinstance(more, dict) else {})
        del model, more
        check_gone(found)


def test_between_forward_and_backward() -> None:
    """The graph goes with the loss."""
    with fake_world(0, 4), collector_off():
        model = sharded()
        loss = loss_of(model)
        found = references(model)
        del model
        loss.backward()
        del loss
        check_gone(found)


def test_an_exception_that_is_kept_keeps_the_model_and_no_longer() -> None:
    """Its traceback's frames hold the model; nothing of ours outlives it."""
    with fake_world(0, 4), collector_off():
        model = sharded()
        model.layers[1].register_full_backward_hook(explode)
        try:
            loss_of(model).backward()
        except Boom as error:
            kept = error
        found = references(model)
        del model
        assert any(reference() is not None for reference in found.values())
        kept.__traceback__ = None
        check_gone(found)
