"""Checkpoints of packed parameters: saved on one mesh, loaded on another and into the plain model."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from _support.checkpoint.dcp_models import adamw, as_they_lie, scramble, whole
from _support.packed_models import PackedLm, even_lm, packed_plan, packed_tokens, uneven_lm
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import StateDictType

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._layout.packed import PackedDTensor
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp import (
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from parallel3d.testing import GlooPool, shards_of

MODELS = {"even": even_lm, "uneven": uneven_lm}
Whole = dict[str, torch.Tensor]


def plain_lm(kind: str) -> PackedLm:
    torch.manual_seed(7)
    return MODELS[kind]().double()


def parallel_lm(kind: str, sizes: tuple[int, int, int]) -> PackedLm:
    model = plain_lm(kind)
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    return parallelize(model, mesh, tp_plan=packed_plan(model))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(packed_tokens(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def all_whole(values: Whole) -> Whole:
    return {name: whole(value) for name, value in values.items()}


def check_equal(found: Whole, want: Whole) -> None:
    """Every rank's rows, and the whole tensors."""
    assert found.keys() == want.keys()
    for name, value in found.items():
        for rank, box, part in shards_of(value.detach()):
            assert torch.equal(part, want[name][box]), f"{name} on rank {rank}"
        assert torch.equal(whole(value), want[name]), name


def check_packed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    packed = [p for p in model.parameters() if isinstance(p, PackedDTensor)]
    assert len(packed) == 6
    for param in packed:
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[param][key]
            assert isinstance(value, PackedDTensor) and value.placements == param.placements
            assert value.dtype == param.dtype


# -- saved here, loaded there ----------------------------------------------------------------------------


def save(kind: str, sizes: tuple[int, int, int], path: str) -> Whole:
    model = parallel_lm(kind, sizes)
    optimizer = adamw(model)
    step(model, optimizer)
    check_packed(model, optimizer)
    state = as_they_lie(model, optimizer)
    dcp.save(state, checkpoint_id=path)
    return all_whole(state)


def load(kind: str, sizes: tuple[int, int, int], path: str, want: Whole) -> None:
    model = parallel_lm(kind, sizes)
    optimizer = adamw(model)
    step(model, optimizer)
    state = as_they_lie(model, optimizer)
    scramble(state.values())
    dcp.load(state, checkpoint_id=path)
    check_equal(as_they_lie(model, optimizer), want)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    step(model, optimizer)  # and goes on


full = pytest.mark.full
# Shard 1, 2 and 4; 6 heads on tp 4 with shard 4 are in tests/layout/test_packed_boxes.py.
ROUND_TRIPS = [
    pytest.param("even", (1, 4, 2), (1, 1, 4), marks=full),
    ("uneven", (1, 2, 4), (1, 1, 4)),
    pytest.param("even", (1, 2, 2), (1, 4, 2), marks=full),
    pytest.param("even", (1, 1, 2), (2, 2, 2), marks=full),
    pytest.param("even", (1, 2, 4), (1, 4, 1), marks=full),
    pytest.param("uneven", (1, 2, 4), (1, 4, 2), marks=full),
    pytest.param("uneven", (1, 1, 4), (1, 2, 4), marks=full),
    pytest.param("uneven", (2, 1, 4), (1, 2, 1), marks=full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "second"), ROUND_TRIPS)
def test_round_trip(gloo_pool: GlooPool, tmp_path: Path, kind, first, second) -> None:
    path = str(tmp_path / "step")
    n = first[0] * first[1] * first[2]
    results = gloo_pool.run(save, kind, first, path, world_size=n)
    want = results[0]
    for other in results[1:]:
        assert all(torch.equal(want[name], other[name]) for name in want)
    check_file(kind, path, want, tmp_path)
    gloo_pool.run(load, kind, second, path, want, world_size=second[0] * second[1] * second[2])


def check_file(kind: str, path: str, want: Whole, tmp_path: Path) -> None:
    """It holds the plain model's tensors, each row once; the weights are those of a plain step."""
    torch_file = tmp_path / "whole.pt"
    dcp_to_torch_save(path, torch_file)
    found = torch.load(torch_file, weights_only=True)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    plain = plain_lm(kind)
    optimizer = adamw(plain)
    step(plain, optimizer)
    for name, value in as_they_lie(plain, optimizer).items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-9)
    plain.load_state_dict({name: found[name] for name in plain.state_dict()})
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, value in want.items():
        chunks = getattr(metadata[name], "chunks", None)
        if chunks:
            assert sum(chunk.sizes.numel() for chunk in chunks) == value.numel(), name


# -- torch's state dict functions ------------------------------------------------------------------------


def by_torchs_functions(kind: str, sizes: tuple[int, int, int]) -> None:
    model = parallel_lm(kind, sizes)
    optimizer = adamw(model)
    step(model, optimizer)
    state = as_they_lie(model, optimizer)
    want = all_whole(state)
    names = list(dict(model.named_parameters()))
    full = StateDictOptions(full_state_dict=True)

    weights = get_model_state_dict(model, options=full)
    moments = get_optimizer_state_dict(model, optimizer, options=full)
    for name in names:
        assert torch.equal(weights[name], want[name]), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments["state"][name][key], want[f"{key} of {name}"]), name
    weights = copied(weights)  # of what one rank has whole they are the memory
    scramble(state[name] for name in names)
    set_model_state_dict(model, weights, options=full)
    check_equal(as_they_lie(model, optimizer), want)

    # As they lie: the objects of the state dict are saved and loaded in place.
    weights = copied(get_model_state_dict(model))
    moments = get_optimizer_state_dict(model, optimizer)
    moments["state"] = {name: copied(each) for name, each in moments["state"].items()}
    scramble(state.values())
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, moments)
    check_equal(as_they_lie(model, optimizer), want)
    check_packed(model, optimizer)
    step(model, optimizer)


def copied(values: Whole) -> Whole:
    return {name: value.detach().clone() for name, value in values.items()}


def what_torch_cannot_cut(kind: str, sizes: tuple[int, int, int]) -> None:
    """Whole values by torch's other ways: an error that says what to call; that works."""
    model = parallel_lm(kind, sizes)
    optimizer = adamw(model)
    step(model, optimizer)
    want = all_whole(as_they_lie(model, optimizer))
    full = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=full)
    moments = get_optimizer_state_dict(model, optimizer, options=full)
    first = dist.get_rank() == 0
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(Parallel3dError, match="load_model_state_dict"):
        set_model_state_dict(model, weights if first else {}, options=sent)
    with pytest.raises(Parallel3dError, match="load_optim_state_dict"):
        set_optimizer_state_dict(model, optimizer, moments if first else {}, options=sent)
    full_type = StateDictType.FULL_STATE_DICT
    load_model_state_dict(
        model, weights if first else {}, type=full_type, broadcast_from_rank0=True
    )
    again = adamw(model)
    named = {"state": moments["state"], "param_groups": moments["param_groups"]}  # as FSDP1's form
    load_optim_state_dict(
        model, again, named if first else {}, type=full_type, broadcast_from_rank0=True
    )
    check_equal(as_they_lie(model, again), want)
    check_packed(model, again)
    step(model, again)
    assert model_state_dict(model, type=full_type).keys() == weights.keys()
    assert optim_state_dict(model, again, type=full_type)["state"].keys() == named["state"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"), [pytest.param("even", (1, 2, 2), marks=full), ("uneven", (1, 1, 4))]
)
def test_torchs_state_dict_functions(gloo_pool: GlooPool, kind, sizes) -> None:
    gloo_pool.run(by_torchs_functions, kind, sizes, world_size=4)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def whole_moments(kind: str, sizes: tuple[int, int, int], name: str) -> None:
    """Whole state that torch has distributed has the parameters' rows, and the next step is the same."""
    model = parallel_lm(kind, sizes)
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    full = StateDictOptions(full_state_dict=True)
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))
    weights = copied(get_model_state_dict(model, options=full))
    step(model, optimizer)
    want = all_whole(as_they_lie(model, optimizer))
    for again in (optimizer, OPTIMIZERS[name](model.parameters())):
        set_model_state_dict(model, copied(weights), options=full)
        set_optimizer_state_dict(model, again, copy.deepcopy(moments), options=full)
        for param, state in again.state.items():
            kinds = {type(value) for value in state.values() if value.dim()}
            assert kinds == {type(param.data)}, kinds
        step(model, again)
        check_equal(as_they_lie(model, again), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "name"),
    [
        ("even", (1, 2, 2), "fused"),
        ("uneven", (1, 1, 4), "foreach"),
        ("uneven", (1, 2, 2), "momentum"),
    ],
)
def test_whole_moments_by_torchs_function(gloo_pool: GlooPool, kind, sizes, name) -> None:
    gloo_pool.run(whole_moments, kind, sizes, name, world_size=4)


@pytest.mark.slow
def test_what_torch_cannot_cut_says_so(gloo_pool: GlooPool) -> None:
    gloo_pool.run(what_torch_cannot_cut, "even", (1, 2, 2), world_size=4)
