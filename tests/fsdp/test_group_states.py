"""Where a group's values are and what is registered: every pair of states, and what models come to."""

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import nn

from parallel3d.errors import StateError
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.fsdp.group import TRANSITIONS, ParamGroup, Registered, ShardedState
from parallel3d.testing import fake_world


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [(kind, old, new) for kind in (ShardedState, Registered) for old in kind for new in kind],
    ids=str,
)
def test_every_pair(kind: type, old: ShardedState | Registered, new: ShardedState | Registered):
    """One of the two changes as the table allows, or neither."""
    group = ParamGroup([])
    name, other = ("state", "registered")[:: 1 if kind is ShardedState else -1]
    setattr(group, name, old)
    before = getattr(group, other)
    if (old, new) in TRANSITIONS:
        group.enter(new)
        assert getattr(group, name) is new
    else:
        with pytest.raises(AssertionError):
            group.enter(new)
        assert getattr(group, name) is old
    assert getattr(group, other) is before


def test_what_models_do_comes_to_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[object, object]] = set()
    enter = ParamGroup.enter

    def noted(group: ParamGroup, new: ShardedState | Registered) -> None:
        seen.add((group.registered if isinstance(new, Registered) else group.state, new))
        enter(group, new)

    monkeypatch.setattr(ParamGroup, "enter", noted)
    with fake_world(0, 4):
        mesh = cpu_mesh(1, 4)
        model = shard_blocks(Lm(), mesh)
        for _ in range(2):
            lm_loss(model, tokens(0)).backward()
        with full_params(model):
            pass
        few = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
        nn.Sequential(few)(torch.ones(1, 8)).sum().backward()
        few(torch.ones(1, 8))  # no backward: the next forward drops what it has left
        few(torch.ones(1, 8)).sum().backward()
    assert seen == TRANSITIONS


def test_other_parameters_can_not_be_unsharded() -> None:
    with fake_world(0, 2):
        model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
        with full_params(model), pytest.raises(StateError, match="in another form"):
            model.unshard()
        model(torch.ones(1, 4)).sum().backward()
