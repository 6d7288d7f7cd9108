"""Full, local and sharded state dicts of a model: made, loaded, and refused where they don't fit."""

import copy

import pytest
import torch
from _support.fsdp.lifetimes import PeakBytes, deep_model
from _support.fsdp.wrapped import at_rest, cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from _support.whole_models import equal_on_ranks, plain_model, sharded
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import Parallel3dError, StateError, parallelize
from parallel3d.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    full_params,
    fully_shard,
    get_state_dict_type,
    load_model_state_dict,
    model_state_dict,
    set_state_dict_type,
    state_dict_type,
)
from parallel3d.testing import fake_world, local_world, record_collectives

FULL = StateDictType.FULL_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2), (1, 3, 2)], ids=str)
def test_round_trips(shape) -> None:
    """Every form saved and loaded over other values; the full one is the plain model's."""
    plain, other = plain_model(), plain_model(seed=1)
    with local_world(shape[0] * shape[1] * shape[2]) as world:
        model = sharded(plain, shape)
        objects = [id(p) for p in model.parameters()]
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())
        with state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
            equal_on_ranks(world, model.state_dict(), plain.state_dict())
        with world.paused():
            whole = copy.deepcopy(plain.state_dict())
        saved = {FULL: whole}
        for kind in (LOCAL, SHARDED):
            saved[kind] = {k: v.clone() for k, v in model_state_dict(model, type=kind).items()}
            assert list(saved[kind]) == list(whole)
        assert not any(isinstance(v, DTensor) for v in saved[LOCAL].values())
        for kind, state in saved.items():
            with record_collectives(model.head.weight.device_mesh) as recorder:
                load_model_state_dict(model, other.state_dict(), type=FULL, assign=kind is LOCAL)
                load_model_state_dict(model, state, type=kind, assign=kind is FULL)
            assert not recorder.calls
            equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())
        load_model_state_dict(model, other.state_dict(), type=FULL, broadcast_from_rank0=True)
        with state_dict_type(model, FULL):
            equal_on_ranks(world, model.state_dict(), other.state_dict())
            model.load_state_dict(whole)
        assert at_rest(model) and objects == [id(p) for p in model.parameters()]
        lm_loss(model, world.map(lambda r: tokens(0))).backward()


def test_names_are_the_plain_models() -> None:
    """Tied, checkpointed and compiled; a unit inside a root that is none; a list of modules as one unit."""
    plain = Lm(layers=1, tied=True)
    with local_world(2) as world:
        model = sharded(plain, (1, 2, 1), activation_checkpointing=True, compile="eager")
        state = model_state_dict(model, type=FULL)
        equal_on_ranks(world, state, plain.state_dict())
        assert state["embed.weight"] is state["head.weight"] or torch.equal(
            world.per_rank(state["embed.weight"])[0], world.per_rank(state["head.weight"])[0]
        )
        load_model_state_dict(model, plain.state_dict(), type=FULL)

        model = copy.deepcopy(plain)
        fully_shard(model.layers[0], mesh=cpu_mesh())
        with state_dict_type(model, FULL):
            equal_on_ranks(world, model.layers[0].state_dict(), plain.layers[0].state_dict())
            assert list(model.state_dict()) == list(plain.state_dict())
            model.load_state_dict(plain.state_dict())
        outer = nn.ModuleDict({"inner": model})
        equal = {f"inner.{k}": v for k, v in plain.state_dict().items()}
        found = model_state_dict(outer, type=FULL)
        assert list(found) == list(equal)
        assert not any(isinstance(value, DTensor) for value in found.values())


class TestMemory:
    def test_one_unit_at_a_time(self) -> None:
        """Ranks that keep nothing never hold more than one unit; those that do, the result beside it."""
        for rank, most in ((3, 2.5), (0, 8 + 2.5)):
            with fake_world(rank, 4):
                model = deep_model(cpu_mesh(2, 2))
                with PeakBytes() as memory:
                    state = model_state_dict(model, type=FULL, rank0_only=True)
                assert len(state) == (8 if rank == 0 else 0)
                assert memory.peak <= most * model[0].weight.nbytes
                with state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
                    assert len(model.state_dict()) == len(state)

    def test_loading_makes_nothing_whole(self) -> None:
        with fake_world(0, 4):
            model = deep_model(cpu_mesh(1, 4))
            state = {f"{i}.weight": torch.ones(32, 32) for i in range(8)}
            with PeakBytes() as memory:
                load_model_state_dict(model, state, type=FULL)
            assert memory.peak <= 2.5 * model[0].weight.to_local().nbytes
            with PeakBytes() as memory:  # one parameter at a time
                load_model_state_dict(model, state, type=FULL, broadcast_from_rank0=True)
            assert memory.peak <= 2.5 * model[0].weight.nbytes


class TestSettings:
    def test_set_and_restored(self) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(), cpu_mesh())
            assert get_state_dict_type(model).state_dict_type is SHARDED
            config = FullStateDictConfig(rank0_only=True)
            before = set_state_dict_type(model, FULL, config, FullOptimStateDictConfig())
            assert before.state_dict_type is SHARDED
            assert get_state_dict_type(model).state_dict_config is config
            with pytest.raises(ZeroDivisionError), state_dict_type(model, LOCAL):
                assert get_state_dict_type(model.layers[0]).state_dict_type is LOCAL
                _ = 1 / 0
            assert get_state_dict_type(model).state_dict_config is config
            clone = copy.deepcopy(model)
            assert get_state_dict_type(clone).state_dict_type is SHARDED
            assert isinstance(clone.state_dict()["norm.weight"], DTensor)
            clone.load_state_dict(clone.state_dict())
            set_state_dict_type(model.layers[0], LOCAL)
            with pytest.raises(Parallel3dError, match="outermost module"):
                get_state_dict_type(model)
            set_state_dict_type(model.layers[0], FULL, config)
            set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
            assert isinstance(model.state_dict()["norm.weight"], DTensor)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            (("full",), "must be one of StateDictType.FULL_STATE_DICT"),
            ((FULL, LocalStateDictConfig()), "must be a FullStateDictConfig"),
            ((LOCAL, None, FullOptimStateDictConfig()), "must be a LocalOptimStateDictConfig"),
        ],
    )
    def test_refused(self, arguments, match) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(), cpu_mesh())
            with pytest.raises(Parallel3dError, match=match):
                set_state_dict_type(model, *arguments)
            assert get_state_dict_type(model).state_dict_type is SHARDED


class TestRefusals:
    def test_forms_that_do_not_fit(self) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(), cpu_mesh())
            whole = Lm().state_dict()
            for kind, match in (
                (SHARDED, "load it as FULL_STATE_DICT if it is a full"),
                (LOCAL, r"this rank's shard of \(19, 12\) has shape \(10, 12\)"),
            ):
                with pytest.raises(RuntimeError, match=match):
                    load_model_state_dict(model, whole, type=kind)
            with pytest.raises(RuntimeError, match=r"head\.weight .*: another shape"):
                load_model_state_dict(model, {**whole, "head.weight": torch.ones(3)}, type=FULL)
            with pytest.raises(RuntimeError, match="Missing key"):
                load_model_state_dict(model, {}, type=FULL)
            for options in ({"rank0_only": True}, {"offload_to_cpu": 3}):
                with pytest.raises(Parallel3dError):
                    model_state_dict(model, type=LOCAL, **options)
            with pytest.raises(Parallel3dError, match="state_dict is list; it must be a dict"):
                load_model_state_dict(model, [], type=FULL)
            for call in (get_state_dict_type, model_state_dict):
                with pytest.raises(Parallel3dError, match=r"3 is not an nn\.Module"):
                    call(3)
            with pytest.raises(Parallel3dError, match="FULL_STATE_DICT"):
                load_model_state_dict(model, whole, broadcast_from_rank0=True)
            assert get_state_dict_type(model).state_dict_type is SHARDED and at_rest(model)

    def test_while_the_model_is_used(self) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(layers=1), cpu_mesh())

            def save(*_: object) -> None:
                model_state_dict(model, type=FULL)

            handle = model.layers[0].register_forward_pre_hook(save)
            with pytest.raises(StateError, match="in a forward or backward"):
                lm_loss(model, tokens(0))
            handle.remove()
            assert at_rest(model)
            with full_params(model):  # what is shown is what there is
                state = model.state_dict()
            assert not any(isinstance(value, DTensor) for value in state.values())

    def test_a_save_that_fails_puts_the_shards_back(self) -> None:
        with fake_world(0, 2):
            model = shard_blocks(Lm(layers=1), cpu_mesh())

            def fail(*_: object) -> None:
                raise ZeroDivisionError

            handle = model.layers[0].down.register_state_dict_post_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model_state_dict(model, type=FULL)
            handle.remove()
            assert at_rest(model) and get_state_dict_type(model).state_dict_type is SHARDED
            lm_loss(model, tokens(0)).backward()

    def test_meta(self) -> None:
        with fake_world(0, 2):
            with torch.device("meta"):
                model = Lm(layers=1)
            shard_blocks(model, cpu_mesh())
            with pytest.raises(StateError, match="meta device"):
                model_state_dict(model, type=FULL)
            # Loading with assign=True gives it values.
            load_model_state_dict(model, Lm(layers=1).state_dict(), type=FULL, assign=True)
            lm_loss(model, tokens(0)).backward()


def test_parallelized_model_of_one_rank() -> None:
    with fake_world(0, 1):
        plain = Lm(layers=1)
        model = parallelize(copy.deepcopy(plain), cpu_mesh(1, 1))
        for kind in (FULL, LOCAL):
            state = model_state_dict(model, type=kind)
            for name, value in plain.state_dict().items():
                assert torch.equal(state[name], value)
