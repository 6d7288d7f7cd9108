"""capture: warm-up, recording and replays, on a graph that records on the CPU; and the ways out of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from _support.ep.models import Mixture
from _support.optim.recorded_graph import RecordedGraph
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.errors import Parallel3dError, StateError, WrongTypeError
from parallel3d.fsdp import fully_shard
from parallel3d.optim.capture import CapturedStep, option_against
from parallel3d.testing import GlooPool, fake_world
from parallel3d.tools.dryrun import record

Batch = dict[str, Any]


class Net(nn.Module):
    """Blocks with a parameter of odd size, and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def batch(number: int, rank: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(0, 11, (8,), generator=draw)
    return {"ids": ids, "labels": ids.flip(0), "weight": torch.rand(8, generator=draw)}


class Training:
    """A model, an optimizer and a step of ``micro`` micro-batches."""

    def __init__(self, mesh: Any = None, micro: int = 1, *, local: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        if mesh is not None:
            for block in (*self.model.blocks, self.model):
                fully_shard(block, mesh=mesh)
        self.micro = micro
        self.lr = torch.tensor(0.01)
        options: Any = {"lr": self.lr, "fused": True, "capturable": True}
        self.optimizer: Any
        if local:
            self.optimizer = p3d.optim.local(torch.optim.AdamW, self.model, **options)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        total = torch.zeros(())
        for number in range(self.micro):
            last = number == self.micro - 1
            if hasattr(self.model, "set_requires_all_reduce"):
                self.model.set_requires_all_reduce(last)
            part = {k: v.chunk(self.micro)[number] for k, v in batch.items()}
            each = F.cross_entropy(self.model(part["ids"]), part["labels"], reduction="none")
            loss = (each * part["weight"]).mean() / self.micro
            loss.backward()
            total = total + loss.detach()
        norm = p3d.optim.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": total, "norm": norm}

    def captured(self, graph: Any, **options: Any) -> CapturedStep:
        optimizers = [self.optimizer]
        return CapturedStep(self.step, self.model, optimizers, batch(0), 3, graph, None, **options)

    def tensors(self) -> list[Tensor]:
        """Weights, buffers, and the optimizer's state."""
        state = [v for each in self.optimizer.state.values() for v in each.values()]
        found = [*self.model.parameters(), *self.model.buffers(), *state]
        return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in found]


def compare(make: Callable[[], Training], steps: int, rank: int = 0) -> RecordedGraph:
    """Steps with and without a graph: results, weights, buffers and state are equal bit for bit."""
    eager, other, graph = make(), make(), RecordedGraph()
    step = other.captured(graph)
    for number in range(steps):
        given = batch(number, rank)
        for training in (eager, other):
            training.lr.fill_(0.01 / (1 + number))
        expected, found = eager.step(given), step(given)
        assert all(torch.equal(found[k], expected[k]) for k in expected), number
        assert all(map(torch.equal, other.tensors(), eager.tensors())), number
        assert step.is_captured == (number >= 3)
        if number % 5 == 4:  # an evaluation between steps sees the weights
            with torch.no_grad():
                for training in (eager, other):
                    training.model.eval()
                one, two = eager.model(given["ids"]), other.model(given["ids"])
                assert torch.equal(one, two)
                for training in (eager, other):
                    training.model.train()
    assert (graph.runs, graph.recorded, graph.replayed) == (3, 1, steps - 3)
    assert (step.steps, step.reason) == (steps, None)
    return graph


def on_mesh(
    size: tuple[int, int], micro: int, static: bool, local: bool = False
) -> Callable[[], Training]:
    mesh = p3d.build_mesh(p3d.MeshLayout(*size), device_type="cpu")

    def make() -> Training:
        training = Training(mesh, micro, local=local)
        training.model.set_static_memory(static)
        return training

    return make


def run_on_mesh(size: tuple[int, int], micro: int, static: bool, local: bool, steps: int) -> None:
    compare(on_mesh(size, micro, static, local), steps, torch.distributed.get_rank())


def test_200_replays_are_eager_steps() -> None:
    compare(lambda: Training(micro=2), 203)


@pytest.mark.parametrize(("micro", "local"), [(1, False), (2, True)])
def test_one_rank_of_the_engine(micro: int, local: bool) -> None:
    with fake_world(0, 1):
        compare(on_mesh((1, 1), micro, static=False, local=local), 12)


# ---- several ranks ----


@pytest.mark.parametrize(
    ("size", "micro", "static", "local"),
    [
        ((1, 2), 1, False, True),
        pytest.param((2, 2), 2, False, False, marks=pytest.mark.slow),
        pytest.param((2, 2), 2, True, True, marks=pytest.mark.slow),
        pytest.param((2, 1), 1, True, False, marks=pytest.mark.slow),
    ],
)
def test_ranks(
    gloo_pool: GlooPool, size: tuple[int, int], micro: int, static: bool, local: bool
) -> None:
    """FSDP and HSDP with accumulation, static memory and ``optim.local``: collectives are replayed."""
    gloo_pool.run(run_on_mesh, size, micro, static, local, 12, world_size=size[0] * size[1])


def fails_on_one_rank() -> tuple[str | None, int]:
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    training, graph = Training(mesh), RecordedGraph()
    if torch.distributed.get_rank() == 1:
        graph.syncs = ["model.py:7"]
    step = training.captured(graph)
    for number in range(5):
        step(batch(number))
    return step.reason, graph.recorded


def test_all_ranks_replay_or_none(gloo_pool: GlooPool) -> None:
    one, other = gloo_pool.run(fails_on_one_rank, world_size=2)
    assert one[1] == other[1] == 0
    assert "the host waits for the GPU in the step, at model.py:7" in str(other[0])
    assert one[0] == f"{other[0]} (on rank 1)"


# ---- what a graph relies on ----


def made(**options: Any) -> tuple[Training, RecordedGraph, CapturedStep]:
    training, graph = Training(), RecordedGraph()
    step = training.captured(graph, **options)
    for number in range(5):
        step(batch(number))
    assert step.is_captured
    return training, graph, step


def test_results_are_copies() -> None:
    _, _, step = made()
    one = step(batch(7))
    before = one["loss"].clone()
    step(batch(8))
    assert torch.equal(one["loss"], before) and not one["loss"].requires_grad


def test_the_batch_is_copied_and_the_example_is_not_used() -> None:
    training, example = Training(), batch(0)
    step = CapturedStep(
        training.step, training.model, [training.optimizer], example, 2, RecordedGraph(), None
    )
    given = batch(1)
    step(given)
    assert all(torch.equal(example[k], v) for k, v in batch(0).items())
    assert all(torch.equal(given[k], v) for k, v in batch(1).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ids": torch.zeros(9, dtype=torch.long)},
            r"batch\['ids'\] is \(9,\) int64; .* \(8,\) int64",
        ),
        ({"ids": torch.zeros(8, dtype=torch.int32)}, r"batch\['ids'\] is \(8,\) int32"),
        ({"ids": 3}, r"batch\['ids'\] is 3; the step was made with \(8,\) int64"),
        ({"more": torch.zeros(1)}, r"batch\['more'\] is in one of them only"),
    ],
)
def test_another_batch_is_an_error(change: Batch, message: str) -> None:
    """Also while the step runs eagerly."""
    training = Training()
    step = p3d.capture(training.step, training.model, training.optimizer, batch(0))
    with pytest.raises(Parallel3dError, match=message):
        step(batch(0) | change)
    step(batch(1))


def test_values_of_a_batch_stay() -> None:
    model = nn.Linear(2, 1)
    step = p3d.capture(
        lambda b: model(b[0]) * b[1], model, torch.optim.SGD(model.parameters()), (torch.ones(2), 3)
    )
    step((torch.zeros(2), 3))
    with pytest.raises(Parallel3dError, match=r"batch\[1\] is 4; the step was made with 3"):
        step((torch.zeros(2), 4))


def test_a_changed_number_is_an_error() -> None:
    training, _, step = made()
    training.optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(
        StateError, match=r"weight_decay of group 0 of AdamW is 0.5; 0.01 is in the cap"
    ):
        step(batch(6))
    training.optimizer.param_groups[0]["weight_decay"] = 0.01
    step(batch(6))
    assert step.is_captured
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)  # another tensor than the graph's
    step(batch(6))
    assert not step.is_captured


def test_another_mode_is_an_error() -> None:
    training, _, step = made()
    training.model.eval()
    with pytest.raises(StateError, match=r"captured in training mode; call model.train\(\)"):
        step(batch(6))


def test_state_that_was_loaded_is_captured_again() -> None:
    training, graph, step = made()
    eager = Training()
    eager.model.load_state_dict(training.model.state_dict())
    eager.optimizer.load_state_dict(deepcopy(training.optimizer.state_dict()))
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.lr, eager.lr = (t.optimizer.param_groups[0]["lr"] for t in (training, eager))
    for number in range(6):
        eager.step(batch(number))
        step(batch(number))
        assert step.is_captured == (number >= 3)
    assert graph.recorded == 2
    assert all(map(torch.equal, training.tensors(), eager.tensors()))


def test_weights_that_were_moved_are_captured_again() -> None:
    training, graph, step = made()
    with torch.no_grad():
        training.model.head.weight.data = training.model.head.weight.detach().clone()
    step(batch(6))
    assert not step.is_captured
    for number in range(3):
        step(batch(number))
    assert step.is_captured and graph.recorded == 2


def test_a_step_may_pop_from_its_batch() -> None:
    """On the CPU, where it runs eagerly, and in a graph; gradients of an input are those of one step."""
    model, found = nn.Linear(2, 1), []

    def train(given: Batch) -> Tensor:
        x = given.pop("x")
        model(x).sum().backward()
        return x.grad + 0

    given = {"x": torch.ones(2, requires_grad=True)}
    optimizer = torch.optim.SGD(model.parameters())
    for graph in (RecordedGraph(), None):
        reason = None if graph else "no CUDA device"
        step = CapturedStep(train, model, [optimizer], given, 2, graph, reason)
        found += [step(given) for _ in range(4)]
    assert all(torch.equal(each, model.weight.detach()[0]) for each in found)
    assert list(given) == ["x"]


def test_values_of_a_batch_may_be_nan_or_in_another_order() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    example = {"x": torch.ones(2), "scale": float("nan"), "array": np.arange(3)}
    step = p3d.capture(lambda b: model(b["x"]), model, optimizer, example)
    other = {"array": example["array"], "scale": float("nan"), "x": torch.zeros(2)}
    assert torch.equal(step(other), model.bias)
    with pytest.raises(Parallel3dError, match=r"batch\['array'\] is array.*make it a tensor"):
        step(other | {"array": np.arange(3)})


class Between:
    """A step that leaves zeroing of gradients, or more, to what is done between steps."""

    def __init__(self, zero: str, *, updates: bool = True) -> None:
        self.training = Training()
        self.zero, self.updates = zero, updates
        self.graph = RecordedGraph()
        made = self.training
        self.step = CapturedStep(
            self.eagerly, made.model, [made.optimizer], batch(0), 3, self.graph, None
        )

    def eagerly(self, given: Batch) -> Tensor:
        model, optimizer = self.training.model, self.training.optimizer
        if self.zero == "first":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(given["ids"]), given["labels"])
        loss.backward()
        if self.updates:
            optimizer.step()
        return loss


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("zero", ["first", "never", "outside"])
def test_gradients_that_stay_between_steps(zero: str, updates: bool) -> None:
    """They are those of eager steps, for an optimizer that steps outside of the graph too."""
    eager, captured = Between(zero, updates=updates), Between(zero, updates=updates)
    for number in range(8):
        eager.eagerly(batch(number))
        captured.step(batch(number))
        for each in (eager.training, captured.training):
            if not updates:
                each.optimizer.step()
            if zero == "outside":
                each.optimizer.zero_grad()
        pairs = zip(eager.training.tensors(), captured.training.tensors(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), number
        grads = ([p.grad for p in each.training.model.parameters()] for each in (eager, captured))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert captured.step.is_captured


def zeroed(training: Training) -> None:
    training.optimizer.zero_grad()


def added(training: Training) -> None:
    training.model.head.weight.sum().backward()


@pytest.mark.parametrize(
    ("zero", "always", "once"),
    [("never", None, zeroed), ("outside", zeroed, added), ("first", None, None)],
)
def test_gradients_that_a_graph_would_not_see(zero: str, always: Any, once: Any) -> None:
    """Replaying would train on other gradients than the eager step does."""
    made = Between(zero)
    for number in range(6):
        made.step(batch(number))
        if always is not None:
            always(made.training)
    (once or zeroed)(made.training)
    if once is None:  # a step that begins with zeroing doesn't care
        made.step(batch(6))
        return
    before = [tensor.clone() for tensor in made.training.tensors()]
    with pytest.raises(StateError, match=r"weight.grad was changed between two steps"):
        made.step(batch(6))
    assert all(map(torch.equal, before, made.training.tensors()))


def test_gradients_that_are_added_before_each_step() -> None:
    made = Between("outside")
    for number in range(4):
        zeroed(made.training)
        added(made.training)
        made.step(batch(number))
    zeroed(made.training)
    added(made.training)
    with pytest.raises(StateError, match=r"head.weight.grad was changed .* another gradient"):
        made.step(batch(4))


def frozen(training: Training) -> None:
    training.model.blocks[0].requires_grad_(False)


def replaced(training: Training) -> None:
    training.model.blocks[1] = deepcopy(training.model.blocks[2])


def evaluated(training: Training) -> None:
    training.model.norm.eval()


def another_buffer(training: Training) -> None:
    training.model.norm.running_mean = torch.ones(6)


@pytest.mark.parametrize("change", [frozen, replaced, evaluated, another_buffer])
def test_a_changed_model_is_captured_again(change: Callable[[Training], None]) -> None:
    (training, graph, step), eager = made(), Training()
    for number in range(5):
        eager.step(batch(number))
    for each in (training, eager):
        change(each)
    for number in range(5, 10):
        eager.step(batch(number))
        step(batch(number))
        assert all(map(torch.equal, training.tensors(), eager.tensors())), number
        assert step.is_captured == (number >= 8)
    assert graph.recorded == 2


# ---- ways out ----


def reason_of(step: CapturedStep) -> str:
    assert step.reason is not None and not step.is_captured
    return step.reason


def test_without_a_gpu_it_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    training, eager = Training(), Training()
    with caplog.at_level(logging.WARNING):
        step = p3d.capture(training.step, training.model, training.optimizer, batch(0))
    assert reason_of(step) == "no CUDA device: the model is on 'cpu'"
    assert "the step runs eagerly: no CUDA device" in caplog.text
    for number in range(5):
        step(batch(number))
        eager.step(batch(number))
    assert all(map(torch.equal, training.tensors(), eager.tensors()))


def test_a_host_that_waits_is_told_and_nothing_is_recorded() -> None:
    training, eager, graph = Training(), Training(), RecordedGraph()
    graph.syncs = ["train.py:12"]
    step = training.captured(graph)
    for number in range(6):
        step(batch(number))
        eager.step(batch(number))
    assert reason_of(step).startswith("the host waits for the GPU in the step, at train.py:12; ")
    assert graph.recorded == 0
    assert all(map(torch.equal, training.tensors(), eager.tensors()))


@pytest.mark.parametrize("where", ["head", "at the end"])
@pytest.mark.parametrize("with_engine", [False, True])
def test_a_capture_that_fails_leaves_the_training_as_it_was(with_engine: bool, where: str) -> None:
    """The step is made eagerly then, and no gradient or gathered weight of the capture is used."""
    with fake_world(0, 1):
        mesh = p3d.build_mesh(p3d.MeshLayout(), device_type="cpu") if with_engine else None
        training, eager, graph = Training(mesh), Training(mesh), RecordedGraph()
        error = RuntimeError("operation not permitted when stream is capturing\nmore")
        step = training.captured(graph)

        def fail(*_: Any) -> None:
            if graph.recorded and step.reason is None:
                raise error

        if where == "head":
            training.model.head.register_forward_pre_hook(fail)
        else:
            graph.error = error
        for number in range(6):
            step(batch(number))
            eager.step(batch(number))
        assert "operation not permitted when stream is capturing; parallel3d dryrun" in reason_of(
            step
        )
        assert graph.recorded == 1
        assert all(map(torch.equal, training.tensors(), eager.tensors()))


def test_a_step_that_raises_in_the_capture() -> None:
    training, graph = Training(), RecordedGraph()
    inner = training.step

    def raising(given: Batch) -> Any:
        training.model(given["ids"]).sum().backward()  # gradients without values
        if graph.recorded and step.reason is None:
            raise RuntimeError("not in a graph")
        training.optimizer.zero_grad()
        return inner(given)

    step = CapturedStep(raising, training.model, [training.optimizer], batch(0), 2, graph, None)
    for number in range(4):
        step(batch(number))
    where = reason_of(step)
    assert "not in a graph" in where and "test_capture.py" in where
    assert all(p.grad is None for p in training.model.parameters())


def test_options_that_cannot_be_captured() -> None:
    model = nn.Linear(2, 2)

    def against(optimizer: Any, given: Any = None, of: nn.Module = model) -> str:
        found = option_against(of, [optimizer], given)
        assert found is not None
        return found

    adamw = torch.optim.AdamW
    fused = adamw(model.parameters(), fused=True, capturable=True)
    assert option_against(model, [fused], None) is None
    assert option_against(model, [torch.optim.SGD(model.parameters())], None) is None
    assert "capturable=True" in against(adamw(model.parameters()))
    assert "capturable=True" in against(adamw(model.parameters(), fused=True))
    on_cpu = adamw(model.parameters(), lr=torch.tensor(0.1), fused=True, capturable=True)
    assert "on the CPU" in against(on_cpu)
    with torch.autograd.detect_anomaly(check_nan=False):
        assert "detect_anomaly" in against(fused)
    with fake_world(0, 2):
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
        offloaded = fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy=CPUOffloadPolicy())
        assert "offloaded to the CPU" in against(fused, of=offloaded)


def test_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(WrongTypeError, match="step_function is 3"):
        p3d.capture(3, model, optimizer, None)  # type: ignore[arg-type]
    with pytest.raises(WrongTypeError, match="model is 3"):
        p3d.capture(print, 3, optimizer, None)  # type: ignore[arg-type]
    with pytest.raises(WrongTypeError, match="optimizer is 'Adam'"):
        p3d.capture(print, model, ["Adam"], None)  # type: ignore[list-item]
    with pytest.raises(WrongTypeError, match="optimizer is None; it must be a torch optimizer"):
        p3d.capture(print, model, None, None)  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match="optimizer is empty"):
        p3d.capture(print, model, [], None)
    with pytest.raises(WrongTypeError, match=r"generators is 1; it must be some torch.Generators"):
        p3d.capture(print, model, optimizer, None, generators=[1])  # type: ignore[list-item]
    p3d.capture(print, model, optimizer, None, generators=torch.Generator())
    with pytest.raises(Parallel3dError, match="warm_up is 1; it must be an integer, 2 or more"):
        p3d.capture(print, model, optimizer, None, warm_up=1)
    with pytest.raises(Parallel3dError, match="ReLU has no parameters"):
        p3d.capture(print, nn.ReLU(), optimizer, None)


# ---- in a dry run ----


def test_a_dry_run_looks_at_the_step_function() -> None:
    """What is between two steps is not part of one."""

    def program(within: bool) -> Callable[[], None]:
        def run() -> None:
            mesh = p3d.build_mesh(p3d.MeshLayout(shard=2))
            training = Training(mesh)

            def step_function(given: Batch) -> Tensor:
                loss = training.step(given)["loss"]
                if within:
                    print(loss.item())
                return loss

            example = batch(0)
            step = p3d.capture(step_function, training.model, training.optimizer, example)
            for number in range(4):
                print(step(batch(number)).item())
            assert step.reason == "this is a dry run"

        return run

    assert record(program(False), 2, check_capture=True).obstacles == ()
    (found,) = record(program(True), 2, check_capture=True).obstacles or ()
    assert found.kind == "host synchronisation" and "in step_function" in found.line


def test_what_other_packages_refuse() -> None:
    """Experts that read sizes, dropout on parts of tensors, and batches that were cut outside."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.drop(self.up(x)))

    with fake_world(0, 2):
        mesh = p3d.build_mesh(p3d.MeshLayout(tp=2), device_type="cpu")
        plan = {"up": "colwise", "down": "rowwise"}
        model = p3d.parallelize(Dropped(), mesh, plan, checks=p3d.Checks(audit=False))
        assert "seeds the generator" in str(option_against(model, [], None))
    with fake_world(0, 2):
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=2, ep=2), device_type="cpu")
        model = p3d.parallelize(Mixture(), mesh, checks=p3d.Checks(audit=False))
        assert "sizes of their messages" in str(option_against(model, [], None))
        p3d.ep.set_capacity(model, 1.25)
        assert option_against(model, [], None) is None
    with fake_world(0, 2):
        mesh = p3d.build_mesh(p3d.MeshLayout(cp=2), device_type="cpu")
        part = p3d.cp.shard_batch({"input_ids": torch.arange(8).view(1, 8)}, mesh)
        assert "cut by p3d.cp.shard_batch" in str(option_against(nn.Linear(2, 2), [], part))
