"""Full, local and sharded state dicts of models and optimizers: made, loaded, and refused."""

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
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
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


# -- optimizers ----------------------------------------------------------------------------------------


def adamw(model: nn.Module, *, turned: bool = False) -> torch.optim.Optimizer:
    """Two groups with their own rates; ``turned``: in another order, with other rates."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    if turned:
        groups = [{"params": vectors[::-1], "lr": 1.0}, {"params": matrices[::-1], "lr": 1.0}]
    else:
        groups = [{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.02}]
    return torch.optim.AdamW(groups, amsgrad=True)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    lm_loss(model, tokens(index)).backward()
    optimizer.step()
    optimizer.zero_grad()


def step(world, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    with world.paused():
        ids = tokens(index)
    lm_loss(model, world.map(lambda r: ids)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2), (1, 3, 2)], ids=str)
def test_round_trips_of_optimizers(shape) -> None:
    plain = plain_model()
    theirs = adamw(plain)
    plain_step(plain, theirs, 0)
    names = {id(p): name for name, p in plain.named_parameters()}
    expected = {names[id(p)]: state for p, state in theirs.state.items()}
    with local_world(shape[0] * shape[1] * shape[2]) as world:
        model = sharded(plain_model(), shape)
        optimizer = adamw(model)
        step(world, model, optimizer, 0)
        full = optim_state_dict(model, optimizer, type=FULL)
        assert set(full["state"]) == set(expected)
        for name, state in full["state"].items():
            assert list(state) == list(expected[name])
            for key, value in state.items():
                for tensor in world.per_rank(value):
                    torch.testing.assert_close(tensor, expected[name][key], rtol=1e-9, atol=1e-12)
        for group, want in zip(full["param_groups"], theirs.param_groups, strict=True):
            assert group["params"] == [names[id(p)] for p in want["params"]]
            assert group["lr"] == want["lr"] and group["amsgrad"]
        local = optim_state_dict(model, optimizer, type=LOCAL)
        assert not any(isinstance(v, DTensor) for s in local["state"].values() for v in s.values())
        shards = optim_state_dict(model, optimizer, type=SHARDED)
        # The plain optimizer's own state, the three forms, and a broadcast, into another order.
        by_name = {"state": expected, "param_groups": full["param_groups"]}
        for kind, saved in ((FULL, by_name), (FULL, full), (LOCAL, local), (SHARDED, shards)):
            new = adamw(model, turned=True)
            broadcast = saved is full
            load_optim_state_dict(
                model, new, saved, type=kind, broadcast_from_rank0=broadcast and kind is FULL
            )
            assert [group["lr"] for group in new.param_groups] == [0.02, 0.01]
            for p, state in optimizer.state.items():
                assert list(new.state[p]) == list(state)
                for key, value in state.items():
                    got = new.state[p][key]
                    assert isinstance(got, DTensor) == isinstance(value, DTensor)
                    if isinstance(value, DTensor):
                        assert got.placements == value.placements
                    for a, b in zip(world.per_rank(got), world.per_rank(value), strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        # The next step is the plain one's.
        step(world, model, new, 1)
        with world.paused():
            plain_step(plain, theirs, 1)
        state = model_state_dict(model, type=FULL)
        for name, want in plain.state_dict().items():
            for tensor in world.per_rank(state[name]):
                torch.testing.assert_close(tensor, want, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_a_whole_checkpoint_on_another_mesh() -> None:
    """Saved on shard 2 x tp 2 and continued under HFSDP, whose shards are cut over replicate too."""
    build = lambda: Lm(dim=16, hidden=24, layers=1, vocab=20).double()  # noqa: E731
    torch.manual_seed(0)
    plain = build()
    start = copy.deepcopy(plain)
    theirs = adamw(plain)
    plain_step(plain, theirs, 0)
    with local_world(4) as world:
        model = sharded(start, (1, 2, 2))
        optimizer = adamw(model)
        step(world, model, optimizer, 0)
        weights = model_state_dict(model, type=FULL)
        moments = optim_state_dict(model, optimizer, type=FULL)
        model = shard_blocks(build(), cpu_mesh(2, 2), shard_optimizer_over_replicate=True)
        optimizer = adamw(model)
        load_model_state_dict(model, weights, type=FULL)
        load_optim_state_dict(model, optimizer, moments, type=FULL)
        step(world, model, optimizer, 1)
        with world.paused():
            plain_step(plain, theirs, 1)
        with full_params(model, writeback=False):
            for name, p in model.named_parameters():
                for tensor in world.per_rank(p.detach()):
                    want = plain.get_parameter(name).detach()
                    torch.testing.assert_close(tensor, want, rtol=1e-8, atol=1e-10)


def test_one_bucket_and_kind_at_a_time() -> None:
    """One gather for each bucket and each of exp_avg and exp_avg_sq; ranks that keep nothing hold one."""
    with fake_world(3, 4):
        mesh = cpu_mesh(1, 4)
        model = deep_model(mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        with PeakBytes() as memory, record_collectives(mesh) as recorder:
            assert optim_state_dict(model, optimizer, type=FULL, rank0_only=True) == {}
        assert len(recorder.calls) == 16 and memory.peak <= 2.5 * model[0].weight.nbytes
        config = FullOptimStateDictConfig(rank0_only=True)
        with state_dict_type(model, FULL, optim_config=config):
            assert optim_state_dict(model, optimizer) == {}


def test_refusals_of_optimizers() -> None:
    with fake_world(0, 2):
        model = shard_blocks(Lm(layers=1), cpu_mesh())
        optimizer = adamw(model)
        stranger = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=1.0)
        with pytest.raises(Parallel3dError, match=r"shape \(3, 2\) that the FSDPLm doesn't have"):
            optim_state_dict(model, stranger)
        with pytest.raises(Parallel3dError, match="it must be an optimizer"):
            optim_state_dict(model, model)
        lm_loss(model, tokens(0)).backward()
        optimizer.step()
        saved = optim_state_dict(model, optimizer, type=FULL)
        name = "head.weight"

        def changed(**moments: torch.Tensor) -> dict:
            state = {**saved["state"], name: {**saved["state"][name], **moments}}
            return {**saved, "state": state}

        strange = {**saved, "state": {**saved["state"], "tail.weight": {}}}
        fewer = {**saved, "param_groups": saved["param_groups"][:1]}
        before = copy.copy(optimizer.state[model.head.weight])
        for given, options, match in (
            ({}, {"type": FULL}, "it must have 'state'"),
            (strange, {"type": FULL}, "has state of tail.weight"),
            (fewer, {"type": FULL}, "has no group with .* and 3 more"),
            (
                changed(exp_avg=torch.ones(3, 12)),
                {"type": FULL},
                "exp_avg of head.weight has shape",
            ),
            (saved, {"type": LOCAL}, "exp_avg of .* in a LOCAL_STATE_DICT"),
            (saved, {"type": SHARDED}, "exp_avg of .* in a SHARDED_STATE_DICT"),
            (saved, {"broadcast_from_rank0": True}, "FULL_STATE_DICT"),
        ):
            with pytest.raises(Parallel3dError, match=match):
                load_optim_state_dict(model, optimizer, given, **options)
        after = optimizer.state[model.head.weight]
        assert all(after[key] is value for key, value in before.items())
        with pytest.raises(Parallel3dError, match="rank0_only=True with LOCAL_STATE_DICT"):
            optim_state_dict(model, optimizer, type=LOCAL, rank0_only=True)
