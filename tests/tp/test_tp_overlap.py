"""The sum of the input's gradient runs beside the computation of the weights' gradients."""

import weakref

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from _support.tp.shared_input import LAYOUTS, Gated, check_equal, plan, with_length
from _support.tp.tp_world import on_rank, tp_mesh
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel3d.testing import fake_world, record_collectives
from parallel3d.tp import overlap


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(overlap.WORTHWHILE, "cpu", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["plain", "checkpoint", "second", "no bias", "twice"])
def test_equals_the_plain_module(layout: str, way: str) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        if way == "checkpoint":
            return checkpoint(model, x, use_reentrant=False)
        if way == "second":
            y = model(x)
            (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
            return y + grad**2
        if way == "twice":  # one module twice on one input
            return model.down(F.silu(model.gate(x)) * model.gate(x) * model.up(x))
        return model(x)

    model = Gated()
    if way == "no bias":
        model.gate.bias = model.up.bias = None
    check_equal(layout, call, model=model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_output_may_be_changed_in_place(layout: str, batch: int) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model.down(model.gate(x).relu_() * model.up(x).mul_(2)).tanh_()

    check_equal(layout, call, batch=batch, length=6)


def parallel(layout: str) -> tuple[Gated, Tensor]:
    model = with_length(on_rank(Gated(), plan(layout)), 6)
    return model, torch.randn(2, 3 if layout == "sequence" else 6, 8, requires_grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order(layout: str) -> None:
    """The sum starts before the readers' weights have gradients, and nobody waits for it till then."""
    with fake_world(0, 2):
        model, x = parallel(layout)
        events: list[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        y = x * 1
        y.register_hook(lambda _: events.append("input"))
        out = model(y)
        with record_collectives(tp_mesh(2)) as recorder:
            for name in ("gate", "up"):
                weight = model.get_parameter(f"{name}.weight")
                weight.register_hook(lambda _, n=name: events.append(f"{n} after {len(started())}"))

            def started() -> list:
                return [c for c in recorder.calls if c.asynchronous]

            out.sum().backward()
        assert len(started()) == 1
        assert events[-1] == "input"
        assert events.index("down.weight") < events.index("gate after 1")
        assert "up after 1" in events


def test_the_same_collectives_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (0, 2**60):
        monkeypatch.setitem(overlap.WORTHWHILE, "cpu", least)
        for layout in LAYOUTS:
            with fake_world(0, 2):
                model, x = parallel(layout)
                with record_collectives(tp_mesh(2)) as recorder:
                    model(x).sum().backward()
            found.append([(c.op, c.bytes) for c in recorder.calls])
    assert found[:2] == found[2:]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_waits_at_once() -> None:
    with fake_world(0, 2), torch.autograd.detect_anomaly(check_nan=True):
        model, x = parallel("replicate")
        with record_collectives(tp_mesh(2)) as recorder:
            model(x).sum().backward()
    assert not any(c.asynchronous for c in recorder.calls)


def test_autocast() -> None:
    with fake_world(0, 2):
        model, x = parallel("replicate")
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()  # outside: what is cast in the forward only must fit there too
        assert model.gate.weight.grad.dtype is x.grad.dtype is torch.float32


def test_only_the_input_or_only_the_weights() -> None:
    with fake_world(0, 2):
        model, x = parallel("replicate")
        out = model(x).sum()
        with record_collectives(tp_mesh(2)) as recorder:
            torch.autograd.grad(out, [model.up.weight, model.gate.bias], retain_graph=True)
            assert not recorder.calls
            torch.autograd.grad(out, x)
            assert len(recorder.calls) == 1


def test_frozen_weight_and_trained_bias() -> None:
    with fake_world(0, 2):
        model, x = parallel("replicate")
        model.up.weight.requires_grad_(False)
        model(x).sum().backward()
        assert model.up.weight.grad is None
        assert model.up.bias.grad is not None


def test_nothing_is_kept() -> None:
    with collector_off(), fake_world(0, 2):
        model, x = parallel("sequence")
        y = x * 1
        ref = weakref.ref(y)
        model(y).sum().backward()
        del y
        assert ref() is None


def test_small_inputs_have_no_further_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(overlap.WORTHWHILE, "cpu", 2**24)
    with fake_world(0, 2):
        model, x = parallel("replicate")
        y = model.up(x)
    assert type(y.grad_fn).__name__ in ("ViewBackward0", "UnsafeViewBackward0", "AddmmBackward0")
