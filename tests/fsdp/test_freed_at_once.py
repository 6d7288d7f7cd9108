"""A deleted model is gone at once, without the garbage collector."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from _support.fsdp.lifetimes import References, collector_off, references
from _support.fsdp.wrapped import shard_blocks
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
    mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
    return parallelize(Lm(vocab=20), mesh, LM_PLAN, **options)


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


def lora() -> nn.Module:
    model = Lm()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model


class Buffered(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(12))


def constructed() -> References:
    return references(sharded())


def constructed_with_a_buffer() -> References:
    return references(sharded(build=Buffered))


def after_forward() -> References:
    model = sharded()
    loss_of(model)
    return references(model)


def between_forward_and_backward() -> References:
    """The graph goes with the loss."""
    model = sharded()
    loss = loss_of(model)
    found = references(model)
    del model
    loss.backward()
    return found


def after_forward_without_grad() -> References:
    model = sharded()
    with torch.no_grad():
        loss_of(model)
    return references(model)


def after_steps() -> References:
    """The second step prefetches."""
    model = sharded()
    for index in range(2):
        loss_of(model, index).backward()
    return references(model)


def after_optimizer_steps() -> References:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(2):
        loss_of(model, index).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    state = {
        f"{key} of {i}": value
        for i, values in enumerate(optimizer.state.values())
        for key, value in values.items()
    }
    return references(model, **state)


def with_an_optimizer_on_the_shards_only() -> References:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    return references(model)


def mixed_precision() -> References:
    model = sharded(mp_policy=MIXED)
    loss_of(model).backward()
    return references(model)


def frozen_parts() -> References:
    model = sharded(build=lora)
    loss_of(model).backward()
    return references(model)


def tied() -> References:
    model = sharded(build=lambda: Lm(tied=True))
    loss_of(model).backward()
    return references(model)


def with_all_reduce_put_off() -> References:
    model = sharded()
    model.set_requires_all_reduce(False)
    loss_of(model).backward()
    return references(model)


def with_sync_put_off() -> References:
    model = sharded()
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    return references(model)


def with_a_hook_and_a_schedule() -> References:
    """Also prefetches that were put off, in a forward whose backward doesn't come."""
    model = sharded(build=lambda: Lm(layers=4))
    model.register_comm_hook(CommHookState(), bf16_compress_hook)
    model.set_limit_all_gathers(1)
    model.set_backward_prefetch(BackwardPrefetch.BACKWARD_POST)
    model.layers[0].set_modules_to_forward_prefetch(list(model.layers[1:]))
    model.layers[3].set_modules_to_backward_prefetch(list(model.layers[:3]))
    for index in range(2):
        loss_of(model, index).backward()
    loss_of(model)
    return references(model)


def half_way_through_accumulate() -> References:
    model = sharded()
    batches = accumulate(model, range(3))
    loss_of(model, next(batches)).backward()
    batches.close()
    return references(model)


def unsharded_by_hand() -> References:
    model = sharded()
    model.unshard()
    model.layers[0].unshard(async_op=True)
    return references(model)


def root_only() -> References:
    model = fsdp.fully_shard(Lm(), mesh=build_mesh(FSDP, device_type="cpu"))
    loss_of(model).backward()
    return references(model)


def modules_as_one_unit() -> References:
    model = Lm()
    mesh = build_mesh(FSDP, device_type="cpu")
    fsdp.fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    shard_blocks(model, mesh)
    loss_of(model).backward()
    return references(model)


def a_block_run_alone() -> References:
    model = sharded()
    model.layers[0](torch.randn(2, 12)).sum().backward()
    loss_of(model).backward()
    return references(model)


def after_conversion() -> References:
    model = sharded()
    loss_of(model).backward()
    model.double()
    loss_of(model).backward()
    return references(model)


def after_loading() -> References:
    model = sharded()
    model.load_state_dict(model.state_dict(), assign=True)
    loss_of(model).backward()
    return references(model)


def after_full_params_and_state_dicts() -> References:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    with fsdp.full_params(model, with_grads=True):
        pass
    optimizer.step()
    with fsdp.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT):
        model.load_state_dict(model.state_dict())
        fsdp.load_optim_state_dict(model, optimizer, fsdp.optim_state_dict(model, optimizer))
    fsdp.set_state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT)
    return references(model)


def after_an_exception_in_forward() -> References:
    model = sharded()
    fail_in_forward(model)
    return references(model)


def after_an_exception_in_backward() -> References:
    model = sharded()
    fail_in_backward(model)
    return references(model)


def after_reset_iter_state() -> References:
    model = sharded()
    fail_in_backward(model)
    model.reset_iter_state()
    loss_of(model).backward()
    return references(model)


def checkpointed() -> References:
    model = sharded(build=Checkpointed)
    loss_of(model).backward()
    return references(model)


def parallelized() -> References:
    model = tensor_parallel()
    loss_of(model).backward()
    return references(model)


def parallelized_with_checkpointing() -> References:
    model = tensor_parallel(activation_checkpointing=True)
    loss_of(model).backward()
    return references(model)


def with_prefetch_lists() -> References:
    """They point at each other."""
    model = sharded()
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    loss_of(model).backward()
    return references(model)


def with_an_all_reduce_hook() -> References:
    model = sharded(FSDP)
    model.layers[0].set_all_reduce_hook(lambda gradient: None)
    loss_of(model).backward()
    return references(model)


def with_a_forward_method() -> References:
    model = sharded(build=WithMethod)
    fsdp.register_fsdp_forward_method(model, "embed_only")
    model.embed_only(tokens(0)).sum().backward()
    loss_of(model).backward()
    return references(model)


class WithMethod(Lm):
    def embed_only(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


def with_a_shared_context() -> References:
    first, second = sharded(), sharded()
    fsdp.share_comm_ctx([first, second])
    loss_of(first).backward()
    loss_of(second).backward()
    found = references(first)
    return found | {f"second's {name}": ref for name, ref in references(second).items()}


def resharded_to_a_smaller_world() -> References:
    model = sharded(FSDP, reshard_after_forward=2)
    loss_of(model).backward()
    return references(model)


def offloaded() -> References:
    model = sharded(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    loss_of(model).backward()
    return references(model)


def copied() -> References:
    """Original and copy, an EMA's way to make one."""
    model = sharded()
    loss_of(model).backward()
    average = copy.deepcopy(model)
    loss_of(average).backward()
    found = references(model)
    return found | {f"copy's {name}": ref for name, ref in references(average).items()}


LIVES = [
    constructed,
    constructed_with_a_buffer,
    after_forward,
    between_forward_and_backward,
    after_forward_without_grad,
    after_steps,
    after_optimizer_steps,
    with_an_optimizer_on_the_shards_only,
    mixed_precision,
    frozen_parts,
    tied,
    with_all_reduce_put_off,
    with_sync_put_off,
    with_a_hook_and_a_schedule,
    half_way_through_accumulate,
    unsharded_by_hand,
    root_only,
    modules_as_one_unit,
    a_block_run_alone,
    after_conversion,
    after_loading,
    after_full_params_and_state_dicts,
    after_an_exception_in_forward,
    after_an_exception_in_backward,
    after_reset_iter_state,
    checkpointed,
    parallelized,
    parallelized_with_checkpointing,
    with_prefetch_lists,
    with_an_all_reduce_hook,
    with_a_forward_method,
    with_a_shared_context,
    resharded_to_a_smaller_world,
    offloaded,
    copied,
]


@pytest.mark.parity("reliability: everything freed at once")
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_freed_at_once(life: Callable[[], References]) -> None:
    """Modules, Parameters, buffers, gradients, units and storage, as soon as the model's name is gone."""
    with fake_world(0, 4), collector_off():
        found = life()
        left = [name for name, reference in found.items() if reference() is not None]
        assert not left, f"{len(left)} of {len(found)} are alive: {', '.join(left[:12])}, ..."


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
        assert [name for name, reference in found.items() if reference() is not None] == []
