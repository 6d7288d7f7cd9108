"""FSDPModule's methods about parameters: unshard, reshard, prefetch, what is kept when."""

import pytest
import torch
from _support.engine.twins import Twins, device_mesh, same, shard_layers, train
from _support.models import Lm, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.testing import fake_world, record_collectives


def layers(engine, count: int = 3, **options) -> tuple[nn.Sequential, object]:
    """Linears of different sizes in a root without parameters, and their mesh."""
    mesh = device_mesh()
    model = nn.Sequential(*[nn.Linear(4 + i, 5 + i) for i in range(count)])
    for layer in model:
        engine.fully_shard(layer, mesh=mesh, **options)
    return engine.fully_shard(model, mesh=mesh, **options), mesh


def run(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 4)).sum()


def gathers(model: nn.Module, mesh) -> list[int]:
    """All-gathers in one forward and one backward."""
    with record_collectives(mesh) as recorder:
        loss = run(model)
        forward = recorder.count("all_gather")
        loss.backward()
    return [forward, recorder.count("all_gather") - forward]


def unshard_and_reshard(engine) -> None:
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    plain, sharded = twins.plain.layers[0], twins.sharded.layers[0]
    for async_op in (False, True):
        handle = sharded.unshard(async_op=async_op)
        if async_op:
            assert isinstance(handle, engine.UnshardHandle)
            handle.wait()
            handle.wait()
        else:
            assert handle is None
        for name, want in plain.named_parameters():
            got = sharded.get_parameter(name)
            assert not isinstance(got, DTensor) and torch.equal(got, want), name
        others = (*twins.sharded.layers[1].parameters(), twins.sharded.head.weight)
        assert all(isinstance(p, DTensor) for p in others)  # not recursive
        sharded.reshard()
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
    # Changed shards are gathered, not what was gathered before.
    with torch.no_grad():
        for model in (plain, sharded):
            for p in model.parameters():
                p.mul_(2)
    sharded.unshard()
    assert torch.equal(sharded.up.weight, plain.up.weight)
    twins.train()
    # By hand before every forward, waited for by the engine.
    for index in range(2):
        for layer in twins.sharded.layers:
            layer.unshard(async_op=True)
        twins.backward(index)
        twins.check_grads()
        twins.step()


@pytest.mark.smoke
@pytest.mark.parity("method: unshard", "method: reshard", "function: UnshardHandle")
def test_unshard_and_reshard(on_ranks) -> None:
    on_ranks(unshard_and_reshard)


@pytest.mark.parity("method: unshard")
def test_what_is_unsharded_by_hand_is_not_gathered_again(engine) -> None:
    with fake_world(0, 2):
        model, mesh = layers(engine)
        run(model).backward()
        for layer in model:
            layer.unshard()
        assert gathers(model, mesh) == [0, 3]


@pytest.mark.parity("method: set_reshard_after_forward")
def test_set_reshard_after_forward(engine) -> None:
    with fake_world(0, 2):
        model, mesh = layers(engine)
        assert gathers(model, mesh) == [3, 3]
        model.set_reshard_after_forward(False)
        assert gathers(model, mesh) == [3, 0]
        model.set_reshard_after_forward(True, recurse=False)
        assert gathers(model, mesh) == [3, 0]
        model.set_reshard_after_forward(True)
        model[1].set_reshard_after_forward(False)
        assert gathers(model, mesh) == [3, 2]
        with pytest.raises(ValueError, match="reshard_after_forward"):
            model.set_reshard_after_forward(2)
        root = engine.fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert gathers(root, mesh) == [1, 0]
        root.set_reshard_after_forward(True)
        assert gathers(root, mesh) == [1, 1]


def kept_after_backward(engine) -> None:
    """Two micro-batches on parameters gathered once; the last one leaves them sharded."""
    mesh = device_mesh()
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, mesh, reshard_after_forward=False))
    for step in range(2):
        counts = []
        for micro_batch in range(2):
            last = micro_batch == 1
            twins.sharded.set_reshard_after_backward(last)
            twins.sharded.set_requires_gradient_sync(last)
            with record_collectives(mesh) as recorder:
                twins.backward(2 * step + micro_batch)
            counts.append(recorder.count("all_gather"))
        assert counts[0] == 3 and counts[1] == 0, counts
        assert all(isinstance(p, DTensor) for p in twins.sharded.parameters())
        twins.check_grads()
        twins.step()
    twins.check_weights()


@pytest.mark.parity(
    "method: set_reshard_after_backward",
    "method: set_requires_gradient_sync",
    "behaviour: gradient accumulation",
)
def test_set_reshard_after_backward(on_ranks) -> None:
    on_ranks(kept_after_backward)


class Watch:
    """Counts the all-gathers issued when layers compute, forwards or backwards."""

    def __init__(self, model: nn.Sequential, recorder) -> None:
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        for i, layer in enumerate(model):
            layer.register_forward_hook(self._note(self.forward, i, recorder))
            layer.register_full_backward_pre_hook(self._note(self.backward, i, recorder))

    def _note(self, where, i, recorder):
        def note(*_):
            where[i] = recorder.count("all_gather")

        return note


@pytest.mark.parity(
    "method: set_modules_to_forward_prefetch", "method: set_modules_to_backward_prefetch"
)
def test_prefetch_lists(engine) -> None:
    """The listed modules' gathers are under way when the module computes."""
    with fake_world(0, 2):
        model, mesh = layers(engine, 5)
        model[0].set_modules_to_forward_prefetch([model[1], model[2], model[3]])
        model[4].set_modules_to_backward_prefetch([model[3], model[2], model[1]])
        for _ in range(2):
            with record_collectives(mesh) as recorder:
                watch = Watch(model, recorder)
                loss = run(model)
                assert watch.forward[0] >= 4 and watch.forward[4] == 5
                recorder.clear()
                loss.backward()
                assert watch.backward[3] >= 4
                assert recorder.count("all_gather") == 5
            for layer in model:
                layer._forward_hooks.popitem()
                layer._backward_pre_hooks.popitem()
        for method in ("forward", "backward"):
            with pytest.raises(ValueError, match="Linear"):
                getattr(model[0], f"set_modules_to_{method}_prefetch")([nn.Linear(2, 2)])


def prefetch_lists(engine) -> None:
    """Right numbers, also where a list names what has run, runs later, or doesn't run."""

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh())
        first, second, third = model.layers
        first.set_modules_to_forward_prefetch([second, third])
        second.set_modules_to_forward_prefetch([third])
        third.set_modules_to_backward_prefetch([second, first])
        second.set_modules_to_backward_prefetch([first])
        model.set_modules_to_forward_prefetch([first])

    twins = train(Lm(layers=3), wrap)
    first, _, third = twins.sharded.layers
    third.set_modules_to_forward_prefetch([first])
    first.set_modules_to_backward_prefetch([third])
    twins.train()
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_forward_prefetch([])
    twins.train()


@pytest.mark.parity(
    "method: set_modules_to_forward_prefetch", "method: set_modules_to_backward_prefetch"
)
def test_prefetch_lists_keep_the_numbers(on_ranks) -> None:
    on_ranks(prefetch_lists)


def embedding_without_unshard_in_backward(engine) -> None:
    mesh = device_mesh()

    def wrap(model: nn.Module) -> None:
        engine.fully_shard(model.embed, mesh=mesh)
        model.embed.set_unshard_in_backward(False)
        shard_layers(engine, model, mesh)

    twins = train(Lm(), wrap)
    with record_collectives(mesh) as recorder:
        loss = lm_loss(twins.sharded, tokens(0))
        assert recorder.count("all_gather") == 4
        loss.backward()
        assert recorder.count("all_gather") == 4 + 2
        twins.sharded.embed.set_unshard_in_backward(True)
        lm_loss(twins.sharded, tokens(0)).backward()
        assert recorder.count("all_gather") == 6 + 4 + 3


@pytest.mark.parity("method: set_unshard_in_backward")
def test_set_unshard_in_backward(on_ranks) -> None:
    on_ranks(embedding_without_unshard_in_backward)


def post_optim_event(engine) -> None:
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    for index in range(3):
        twins.backward(index)
        twins.check_grads()
        twins.step()
        twins.sharded.set_post_optim_event(torch.Event("cpu"))
    twins.check_weights()


@pytest.mark.parity("method: set_post_optim_event")
def test_set_post_optim_event(on_ranks) -> None:
    """On the CPU there is nothing to wait for; the event is accepted."""
    on_ranks(post_optim_event)


def evaluation(engine) -> None:
    """Between steps, without gradients and in inference mode; nothing is left gathered."""
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(twins.sharded(tokens(5)).clone(), twins.plain(tokens(5)).clone(), mode.__name__)
        twins.train()
        with mode():
            same(twins.sharded(tokens(6)).clone(), twins.plain(tokens(6)).clone(), mode.__name__)


@pytest.mark.parity("behaviour: inference mode and no_grad")
def test_evaluation(on_ranks) -> None:
    on_ranks(evaluation)


@pytest.mark.parity("behaviour: inference mode and no_grad")
def test_evaluation_reshards_every_unit_but_the_root(engine) -> None:
    with fake_world(0, 2):
        model, mesh = layers(engine)
        for mode in (torch.no_grad, torch.inference_mode):
            with record_collectives(mesh) as recorder, mode():
                for _ in range(2):
                    run(model)
            assert recorder.count("all_gather") == 6
            assert all(isinstance(p, DTensor) for p in model.parameters())
