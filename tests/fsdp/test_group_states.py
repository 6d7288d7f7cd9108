"""Where a group's values are and what is registered: every (state, event) pair, and what models come to."""

from itertools import product

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import nn

from parallel3d.errors import StateError
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.fsdp.group import TRANSITIONS, Event, ParamGroup, Registered, ShardedState
from parallel3d.testing import fake_world

OF_MODULES = {Event.REGISTER, Event.UNREGISTER, Event.SHOW_OTHER, Event.HIDE_OTHER}


@pytest.mark.parametrize(
    ("state", "registered", "event"), list(product(ShardedState, Registered, Event)), ids=str
)
def test_every_pair(state: ShardedState, registered: Registered, event: Event) -> None:
    """An event changes one of the two as the table says, or can't happen."""
    group = ParamGroup([])
    group.state, group.registered = state, registered
    mine = registered if event in OF_MODULES else state
    if (mine, event) not in TRANSITIONS:
        with pytest.raises(KeyError):
            group.enter(event)
        assert (group.state, group.registered) == (state, registered)
        return
    group.enter(event)
    became = TRANSITIONS[mine, event]
    assert (group.state, group.registered) == (
        (state, became) if event in OF_MODULES else (became, registered)
    )


def test_what_models_do_comes_to_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[object, Event]] = set()
    enter = ParamGroup.enter

    def noted(group: ParamGroup, event: Event) -> None:
        seen.add((group.registered if event in OF_MODULES else group.state, event))
        enter(group, event)

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
    assert seen == set(TRANSITIONS)


def test_other_parameters_can_not_be_unsharded() -> None:
    with fake_world(0, 2):
        model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
        with full_params(model), pytest.raises(StateError, match="in another form"):
            model.unshard()
        model(torch.ones(1, 4)).sum().backward()
