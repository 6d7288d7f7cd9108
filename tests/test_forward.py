"""Another forward for a module: copies, signatures, forwards of the instance, and no cycle."""

import copy
import functools
import inspect
import weakref

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from _support.models import LM_PLAN, Block, Lm, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d.activations.selective import recomputed
from parallel3d.testing import fake_world
from parallel3d.tp import PrepareInput, resolve_plan


def doubled(inner):
    def forward(self, *args, **kwargs):
        return 2 * inner(self, *args, **kwargs)

    return as_if(forward, inner)


class TestWrapForward:
    def test_computes_and_looks_like_the_one_before(self) -> None:
        block, x = Block(), torch.randn(2, 12)
        expected, signature = block(x), inspect.signature(block.forward)
        before = Block.forward
        assert wrap_forward(block, doubled, "doubled") is before
        assert torch.equal(block(x), 2 * expected)
        assert inspect.signature(block.forward) == signature
        assert isinstance(block, Block) and type(block).__name__ == "Block"
        assert repr(block) == repr(Block())
        wrap_forward(block, doubled, "doubled")
        assert torch.equal(block(x), 4 * expected)
        assert inspect.signature(block.forward) == signature

    def test_modules_of_a_class_share_one_subclass(self) -> None:
        blocks = [Block(), Block(), Block()]
        for block in blocks[:2]:
            wrap_forward(block, doubled, "doubled")
        wrap_forward(blocks[2], doubled, "another")
        assert type(blocks[0]) is type(blocks[1]) is not type(blocks[2])

    def test_a_forward_of_the_instance_is_wrapped(self) -> None:
        block, x = Block(), torch.randn(2, 12)
        expected = block(x)

        def own(x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
            return scale * Block.forward(block, x)

        block.forward = own
        wrap_forward(block, doubled, "doubled")
        torch.testing.assert_close(block(x), 6 * expected)
        assert list(inspect.signature(block.forward).parameters) == ["x", "scale"]
        # One that the user puts over it, and that is wrapped in turn, calls it.
        block.forward = functools.partial(block.forward, scale=5.0)
        wrap_forward(block, doubled, "doubled")
        torch.testing.assert_close(block(x), 20 * expected)

    def test_a_copy_uses_its_own_parameters(self) -> None:
        block, x = Block(), torch.randn(2, 12)
        wrap_forward(block, doubled, "doubled")
        expected = block(x)
        twin = copy.deepcopy(block)
        with torch.no_grad():
            block.down.weight.zero_()
        assert torch.equal(twin(x), expected)
        assert twin.forward.__self__ is twin


def local(model: nn.Module) -> nn.Module:
    """Shows local tensors, as the engine does before a forward."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor):
                module._parameters[name] = nn.Parameter(param.to_local().detach())
    return model


@pytest.mark.parity("reliability: everything freed at once")
@pytest.mark.parametrize("compiled", [False, True])
def test_modules_are_freed_at_once(compiled: bool) -> None:
    """Tensor parallelism, checkpointing and compile leave no cycle: reference counts free it all."""
    plan = {**LM_PLAN, "layers.*": PrepareInput(), "layers.*.up": "colwise"}
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        model = Lm(layers=2)
        local(resolve_plan(model, plan, 2).apply(model, mesh))
        for block in model.layers:
            wrap_forward(block, recomputed, "checkpoint")
            if compiled:
                compile = functools.partial(torch.compile, backend="aot_eager")
                wrap_forward(block, compile, ("compile", "aot_eager"))
        for _ in range(2):
            lm_loss(model, tokens(0)).backward()
        alive = {name: weakref.ref(m) for name, m in model.named_modules()}
        with collector_off():
            del model, block
            assert [name for name, ref in alive.items() if ref() is not None] == []
