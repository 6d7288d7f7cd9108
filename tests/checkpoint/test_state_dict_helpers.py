"""torch.distributed.checkpoint.state_dict's functions on our models, beside the plain one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from _support.checkpoint.dcp_models import adamw, check_equal, everything, loss_of, whole
from _support.checkpoint.kinds import MODELS, advance, on_mesh
from _support.checkpoint.small_models import same
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from parallel3d.optim import local, step_in_backward

FULL = partial(StateDictOptions, full_state_dict=True)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, weight_decay=0.03)


def make_local(model: nn.Module) -> torch.optim.Optimizer:
    return local(torch.optim.AdamW, model, lr=1e-2, weight_decay=0.03)


def make_in_backward(model: nn.Module) -> Any:
    return step_in_backward(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.03)


def wholes(state: Any) -> Any:
    """A copy with whole tensors."""
    return tree_map_only(torch.Tensor, whole, state)


def copied(state: Any) -> Any:
    """A copy as it lies."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)


def with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    """torch makes a list of betas on its way."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}


def keys_of(state: Any) -> Any:
    return tree_map(lambda v: tuple(v.shape) if isinstance(v, torch.Tensor) else None, state)


def rounds(kind: str, layout: str, make: Callable[[nn.Module], Any]) -> None:
    model = on_mesh(kind, layout)
    optimizer = make(model)
    advance(kind, model, optimizer)
    expected = everything(model, optimizer)

    # The plain model gives the same names and shapes, in every form.
    beside = MODELS[kind]()
    its = make_adamw(beside)
    advance(kind, beside, its)
    forms = [{}, {"flatten_optimizer_state_dict": True}, {"ignore_frozen_params": True}]
    got = {}
    for number, form in enumerate(forms):
        want = get_state_dict(beside, its, options=FULL(**form))
        found = got[number] = wholes(get_state_dict(model, optimizer, options=FULL(**form)))
        assert keys_of(found[0]) == keys_of(want[0]), form
        a, b = ({k: v for k, v in each[1].items() if k != "param_groups"} for each in (found, want))
        assert keys_of(a).keys() == keys_of(b).keys(), form
        part = get_state_dict(model, optimizer, options=StateDictOptions(**form))
        same(wholes(part), found)
    offloaded = get_state_dict(model, optimizer, options=FULL(cpu_offload=True))
    if dist.get_rank() == 0:
        same(offloaded[0], got[0][0])
        same(offloaded[1]["state"], got[0][1]["state"])
    else:
        assert not offloaded[0] and not offloaded[1]
    check_equal(everything(model, optimizer), expected)

    # What was got goes into another one, with and without state of its own.
    def fresh(stepped: bool) -> tuple[nn.Module, Any]:
        other = on_mesh(kind, layout)
        with torch.no_grad():
            for tensor in other.state_dict().values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
        opt = make(other)
        if stepped:
            advance(kind, other, opt, 5)
        return other, opt

    as_it_lies = [
        tuple(map(copied, get_state_dict(model, optimizer, options=StateDictOptions(**form))))
        for form in forms[:2]
    ]
    for stepped in (False, True):
        for form, (weights, moments) in zip(forms, as_it_lies, strict=False):
            other, opt = fresh(stepped)
            options = StateDictOptions(**form)
            state = copied(weights), copied(moments)
            set_state_dict(
                other, opt, model_state_dict=state[0], optim_state_dict=state[1], options=options
            )
            check_equal(everything(other, opt), expected)
        if kind == "packed":
            continue
        # A flattened optimizer, whole, torch can't set: not its own either.
        for sent in (False, True):
            other, opt = fresh(stepped)
            options = FULL(broadcast_from_rank0=sent)
            state = tuple(map(copied, got[0]))
            if sent and dist.get_rank():
                state = {}, {}
            set_model_state_dict(other, state[0], options=options)
            set_optimizer_state_dict(other, opt, state[1], options=options)
            check_equal(with_tuples(everything(other, opt)), expected)
            advance(kind, other, opt, 3)


CASES = [
    pytest.param("plain", "fsdp + tp", make_adamw, marks=pytest.mark.slow),
    pytest.param("plain", "hsdp", make_local, marks=pytest.mark.slow),
]
MORE = [
    ("tied", "fsdp", make_in_backward),
    ("packed", "tp", make_adamw),
    *((kind, "fsdp + tp", make_adamw) for kind in ("tied", "frozen", "packed")),
    *(("plain", layout, make_local) for layout in ("fsdp", "tp", "fsdp + tp")),
    ("plain", "hsdp", make_adamw),
    ("plain", "fsdp", make_in_backward),
    ("packed", "tp", make_local),
    ("frozen", "hsdp", make_local),
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]


@pytest.mark.parametrize(("kind", "layout", "make"), ALL, ids=lambda v: getattr(v, "__name__", v))
def test_state_dicts_go_round(gloo_pool, kind: str, layout: str, make: Any) -> None:
    gloo_pool.run(rounds, kind, layout, make, world_size=4)


# -- other options -----------------------------------------------------------------------------------------


def not_strict(layout: str) -> None:
    model = on_mesh("plain", layout)
    before = everything(model)
    state = get_model_state_dict(model, options=FULL())
    zero = {name: torch.zeros_like(value) for name, value in state.items()}
    del zero["head.weight"]
    zero["extra"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="extra"):  # torch fills up what is missing
        set_model_state_dict(model, copied(zero), options=FULL())
    found = set_model_state_dict(model, copied(zero), options=FULL(strict=False))
    assert found.unexpected_keys == ["extra"]
    after = everything(model)
    assert torch.equal(after.pop("head.weight"), before["head.weight"])
    assert not any(value.any() for value in after.values())
    sent = zero if dist.get_rank() == 0 else {}
    set_model_state_dict(model, copied(before), options=FULL())
    options = FULL(strict=False, broadcast_from_rank0=True)
    set_model_state_dict(model, copied(sent), options=options)
    check_equal({k: v for k, v in everything(model).items() if k != "head.weight"}, after)


def submodules(layout: str) -> None:
    model = on_mesh("plain", layout)
    block = model.layers[0]
    for keep in (True, False):
        options = StateDictOptions(keep_submodule_prefixes=keep)
        with pytest.warns(FutureWarning):
            found = get_model_state_dict(model, submodules={block}, options=options)
        prefix = "layers.0." if keep else ""
        assert set(found) == {f"{prefix}{name}" for name in block.state_dict()}
        same(wholes(found), wholes({f"{prefix}{k}": v for k, v in block.state_dict().items()}))
    # A unit alone, as a model of its own.
    same(wholes(get_model_state_dict(block)), wholes(block.state_dict()))
    optimizer = make_adamw(block)
    loss_of(model, 0).backward()
    optimizer.step()
    weights, moments = get_state_dict(block, optimizer)
    assert set(moments["state"]) == {name for name, _ in block.named_parameters()}
    expected = everything(block, optimizer)
    weights, moments = copied(weights), copied(moments)
    optimizer.step()
    set_state_dict(block, optimizer, model_state_dict=weights, optim_state_dict=moments)
    check_equal(everything(block, optimizer), expected)


@pytest.mark.parametrize("layout", ["hsdp", "fsdp + tp"])
def test_not_strict(gloo_pool, layout: str) -> None:
    gloo_pool.run(not_strict, layout, world_size=4)


@pytest.mark.parametrize("layout", ["hsdp", "fsdp + tp"])
def test_submodules(gloo_pool, layout: str) -> None:
    gloo_pool.run(submodules, layout, world_size=4)
