"""Modules that read the same tensor share one copy or all-gather, and its one reduction."""

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from _support.tp.shared_input import LAYOUTS, Gated, check_equal, plan, with_length
from _support.tp.tp_world import on_rank, on_ranks, tp_mesh
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel3d.testing import Recorder, fake_world, local_world, record_collectives
from parallel3d.tp import Colwise, PrepareInput


def count(
    layout: str, use: Callable[[nn.Module, Tensor], object], model: nn.Module | None = None
) -> Recorder:
    """What ``use(model, x)`` communicates on rank 0 of two; ``x`` is no leaf."""
    model = Gated() if model is None else model
    with fake_world(0, 2):
        mesh = tp_mesh(2)
        with_length(on_rank(model, plan(layout)), 6)
        x = torch.randn(2, 3 if layout == "sequence" else 6, 8, requires_grad=True) * 1
        with record_collectives(mesh) as recorder:
            use(model, x)
    return recorder


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [2, 3])
def test_equals_the_plain_module(layout: str, tp: int) -> None:
    check_equal(layout, tp=tp)


def test_one_collective_for_gate_and_up() -> None:
    calls = count("replicate", backward).calls
    assert [c.op for c in calls] == ["all_reduce"] * 2  # down's output; x's gradient
    assert {c.bytes for c in calls} == {2 * 6 * 8 * 4}
    calls = count("sequence", backward).calls
    assert [c.op for c in calls] == ["all_gather", "reduce_scatter"] * 2


def test_a_leaf_is_shared_too_and_freed_by_backward() -> None:
    refs = []

    def use(model: nn.Module, x: Tensor) -> None:
        leaf = x.detach().requires_grad_()
        refs.append(weakref.ref(leaf))
        model(leaf).sum().backward()

    with collector_off():
        assert count("replicate", use).count("all_reduce") == 2
        assert refs[0]() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_is_freed_with_its_graph(layout: str) -> None:
    refs = []

    def use(model: nn.Module, x: Tensor) -> None:
        y = x * 2
        refs.append(weakref.ref(y))
        out = model(y)
        del y, out

    with collector_off():
        count(layout, use)
        assert refs[0]() is None


def test_what_was_taken_goes_with_the_input() -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        axis = model.gate._parallel3d_tp.axis
        with torch.no_grad():
            y = x * 2
            model(y)
            assert axis.gathered[-1].result is not None
            del y
            assert axis.gathered[-1].result is None
        assert len(axis.gathered) == 1

    count("sequence", use)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_ends_what_was_taken(layout: str) -> None:
    """The graph is used up: what was taken of an input that lives on must not be given again."""

    def use(model: nn.Module, x: Tensor) -> None:
        axis = model.gate._parallel3d_tp.axis
        model(x).sum().backward()
        kept = axis.copies if layout == "replicate" else axis.gathered
        assert kept and all(taken.result is None for taken in kept)

    count(layout, use)


@pytest.mark.parametrize(("layout", "most"), [("replicate", 4), ("sequence", 1)])
def test_few_inputs_are_remembered(layout: str, most: int) -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        axis = model.gate._parallel3d_tp.axis
        inputs = [x * i for i in range(6)]
        outputs = [model.gate(y) for y in inputs]
        kept = axis.copies if layout == "replicate" else axis.gathered
        assert [id(taken()) for taken in kept] == [id(y) for y in inputs[-most:]]
        del outputs

    count(layout, use)


def test_without_gradient_there_is_no_all_reduce() -> None:
    assert count("replicate", lambda m, x: backward(m, x.detach())).count() == 1
    with torch.no_grad():
        assert count("replicate", lambda m, x: m(x)).count() == 1
        gathers = count("sequence", lambda m, x: m(x))
    assert (gathers.count("all_gather"), gathers.count("reduce_scatter")) == (1, 1)


def test_frozen_weights_share_too() -> None:
    model = Gated().requires_grad_(False)
    assert count("replicate", backward, model).count("all_reduce") == 2
    calls = count("sequence", backward, Gated().requires_grad_(False))
    assert (calls.count("all_gather"), calls.count("reduce_scatter")) == (2, 2)


def test_a_changed_input_is_taken_again() -> None:
    """A frozen reader doesn't save its input, so the model may change it before the next one."""

    def changing(model: nn.Module, x: Tensor) -> Tensor:
        y = x * 1.5
        first = model.gate(y)
        return model.down(first + model.up(y.mul_(2)))

    plain = Gated().double().requires_grad_(False)
    model, x = copy.deepcopy(plain), torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    changing(plain, x).sum().backward()
    with local_world(2) as world:
        on_ranks(model, plan("replicate"), world)
        model.requires_grad_(False)
        mine = world.map(lambda r: x.detach().clone()).requires_grad_()
        with record_collectives(tp_mesh(2)) as recorder:
            changing(model, mine).sum().backward()
        assert recorder.count("all_reduce") == 3
        for grad in world.per_rank(mine.grad):
            torch.testing.assert_close(grad, x.grad)


def test_a_changed_input_is_gathered_again() -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            model.gate(x)
            x.mul_(2)
            model.up(x)

    assert count("sequence", use).count("all_gather") == 2


def cut(x: Tensor) -> None:
    x.detach_().requires_grad_()


def replace_data(x: Tensor) -> None:
    x.data = x.data * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [cut, replace_data])
def test_a_change_without_a_version_is_seen(layout: str, change: Callable[[Tensor], None]) -> None:
    """Truncated backpropagation, and adversarial training, do so to a tensor that they keep."""

    def use(model: nn.Module, x: Tensor) -> None:
        before = model.gate(x)
        change(x)
        after = model.up(x)
        if layout == "replicate":
            torch.testing.assert_close(after, F.linear(x, model.up.weight, model.up.bias))
        after.sum().backward()
        assert before.requires_grad
        assert not x.is_leaf or x.grad is not None

    calls = count(layout, use)
    reductions = calls.count("all_reduce" if layout == "replicate" else "reduce_scatter")
    assert reductions == 1
    assert calls.count("all_gather") == (2 if layout == "sequence" else 0)


def test_grad_mode_makes_a_difference() -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            first = model.gate(x)
        out = first + model.up(x)
        out.sum().backward()

    assert count("replicate", use).count("all_reduce") == 1
    calls = count("sequence", use)
    assert (calls.count("all_gather"), calls.count("reduce_scatter")) == (2, 1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation(layout: str, reentrant: bool) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(model.down, "_parallel3d_tp"):
            return model(x) + model(x * 3)
        y = checkpoint(model, x, use_reentrant=reentrant)
        return y + checkpoint(model, x * 3, use_reentrant=reentrant)

    check_equal(layout, call)


def test_each_reader_may_be_recomputed_by_itself() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(model.down, "_parallel3d_tp"):
            return model(x)
        a = checkpoint(model.gate, x, use_reentrant=False)
        return model.down(F.silu(a) * model.up(x))

    check_equal("replicate", call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives(layout: str) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        return y + grad**2

    check_equal(layout, call, length=6)


def test_backward_twice_and_the_same_input_in_two_steps() -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        x = x.detach().requires_grad_()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
        torch.testing.assert_close(x.grad, 2 * once)
        model(x).sum().backward()
        torch.testing.assert_close(x.grad, 3 * once)

    assert count("replicate", use).count("all_reduce") == 2 + 3


def test_a_module_that_writes_to_a_shared_copy_is_refused() -> None:
    class Writes(Gated):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    model = Writes()
    with fake_world(0, 2):
        plan = {"": PrepareInput(), "gate": Colwise(input="gathered")}
        on_rank(model, plan)
        x = torch.randn(2, 8, requires_grad=True) * 1
        with pytest.raises(RuntimeError, match="inplace"):
            model(x)


def test_an_encoders_output_is_copied_once_for_all_layers() -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        total = x.new_zeros(())
        for _ in range(5):
            for y in (x * 2, x * 3, x * 4, x):
                total = total + model.gate(y).sum() + model.up(y).sum()
        total.backward()

    assert count("replicate", use).count("all_reduce") == 15 + 1


def test_a_copied_model_remembers_for_itself() -> None:
    def use(model: nn.Module, x: Tensor) -> None:
        y = model(x)
        twin = copy.deepcopy(model)
        (twin(x) + y).sum().backward()

    assert count("replicate", use).count("all_reduce") == 3


def test_inference_mode() -> None:
    with torch.inference_mode():
        calls = count("sequence", lambda model, x: model(x))
    assert calls.count("all_gather") == 2


def test_compiled_equals_eager() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated = Gated()

        def forward(self, x: Tensor) -> Tensor:
            return self.gated(x * 2)

    model = Two()
    with fake_world(0, 2):
        full = {f"gated.{name}": style for name, style in plan("replicate").items()}
        on_rank(model, full)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 6, 8, requires_grad=True)
        want = torch.autograd.grad(model(x).sum(), x)
        got = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(got, want)


def test_simulated_ranks_share() -> None:
    model = Gated()
    with local_world(2) as world:
        on_ranks(model, plan("replicate"), world)
        x = world.map(lambda r: torch.randn(2, 8)).requires_grad_()
        with record_collectives(tp_mesh(2)) as recorder:
            model(x * 1).sum().backward()
    assert recorder.count("all_reduce") == 2
