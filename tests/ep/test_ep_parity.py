"""Expert parallelism against the plain model, on simulated ranks."""

import functools

import pytest
import torch
from _support.ep.models import Batched, MixedHead, Mixture, Transposed, batch, loss

from parallel3d import Checks, MeshLayout, Sharding, ep
from parallel3d.errors import MeshError, PlanError
from parallel3d.testing import assert_parity

SPLIT = {"layers.*.shared": "colwise_gather_output"}


def parity(build=Mixture, *, micro_batches=1, defer="all_reduce", layout, **options):
    # Its arguments have other names, so a rule must say what it is.
    rules = {"layers.*.experts": ep.Experts()} if Transposed in getattr(build, "args", ()) else {}
    plan = (SPLIT if layout.get("tp", 1) > 1 else {}) | rules
    return assert_parity(
        build,
        batch,
        MeshLayout(**layout),
        loss=loss,
        micro_batches=micro_batches,
        defer=defer,
        tp_plan=plan or None,
        checks=Checks(audit=False),
        **options,
    )


@pytest.mark.parametrize(
    "layout",
    [
        {"shard": 4, "ep": 2},
        {"shard": 4, "ep": 4},
        {"replicate": 2, "shard": 2, "ep": 2},
        {"shard": 2, "tp": 2, "ep": 4},
        {"shard": 2, "tp": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"replicate": 2, "shard": 3, "ep": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Batched, Transposed], ids=lambda kind: kind.__name__)
def test_as_the_plain_model(kind, layout) -> None:
    found = parity(functools.partial(Mixture, kind, 6 if layout["ep"] == 3 else 4), layout=layout)
    assert found.grads["float64"] < 1e-12


@pytest.mark.ci
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(functools.partial(Mixture, experts=7), id="7 experts on 4 ranks"),
        pytest.param(functools.partial(Mixture, experts=4, hot=True), id="two hot experts"),
        pytest.param(functools.partial(Mixture, experts=4, top_k=1), id="one expert a token"),
        pytest.param(functools.partial(Mixture, experts=4, top_k=4), id="all experts of a token"),
    ],
)
def test_routing(build) -> None:
    assert parity(build, layout={"shard": 4, "ep": 4}).grads["float64"] < 1e-12


def test_experts_in_the_root() -> None:
    found = parity(MixedHead, layout={"shard": 4, "ep": 2}, steps=2, fp32=False)
    assert found.grads["float64"] < 1e-12


@pytest.mark.ci
@pytest.mark.parametrize("defer", ["all_reduce", "sync", "nothing"])
def test_accumulated(defer) -> None:
    layout = {"replicate": 2, "shard": 2, "ep": 2}
    assert parity(layout=layout, micro_batches=4, defer=defer).grads["float64"] < 1e-12


@pytest.mark.ci
@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputed(kind) -> None:
    layout = {"shard": 4, "ep": 2}
    found = parity(layout=layout, activation_checkpointing=kind)
    assert found.grads["float64"] < 1e-12


@pytest.mark.ci
@pytest.mark.parametrize("reshard", [False, True])
def test_kept_after_forward(reshard) -> None:
    found = parity(layout={"shard": 4, "ep": 2}, fsdp=Sharding(reshard_after_forward=reshard))
    assert found.grads["float64"] < 1e-12


@pytest.mark.ci
def test_optimizer_sharded_over_replicate() -> None:
    layout = {"replicate": 2, "shard": 2, "ep": 2}
    found = parity(layout=layout, fsdp=Sharding(shard_optimizer_over_replicate=True))
    assert found.grads["float64"] < 1e-12


@pytest.mark.ci
@pytest.mark.parametrize("frozen", ["experts", "router", "embed"])
def test_frozen(frozen) -> None:
    def build() -> torch.nn.Module:
        model = Mixture()
        for name, param in model.named_parameters():
            param.requires_grad_(frozen not in name)
        return model

    assert parity(build, layout={"shard": 4, "ep": 4}).grads["float64"] < 1e-12


def test_refused() -> None:
    with pytest.raises(
        MeshError, match=r"ep=3 doesn't divide shard 4 x cp 1 x tp 1 = 4.*1, 2 or 4"
    ):
        MeshLayout(shard=4, ep=3)
    with pytest.raises(MeshError, match="ep is -1: it can't be inferred"):
        MeshLayout(shard=4, ep=-1)
    with pytest.raises(PlanError, match=r"holds 4 experts, fewer than ep=8 ranks.*Use ep=4"):
        parity(layout={"shard": 8, "ep": 8})
    with pytest.raises(PlanError, match="no module of Linear is known to hold experts"):
        assert_parity(
            functools.partial(torch.nn.Linear, 4, 4), torch.randn(2, 4), MeshLayout(shard=2, ep=2)
        )


class Sorted(Batched):
    """Experts that are given their tokens sorted, as llama4's: nothing says which token goes where."""

    def forward(self, hidden, *sorted):
        return hidden


@pytest.mark.parametrize("rules", [{}, {"layers.*.experts": ep.Experts()}], ids=["found", "named"])
def test_experts_called_in_another_way_are_refused(rules) -> None:
    with pytest.raises(
        PlanError, match=r"experts \(Sorted\) is called with \(hidden\); ep divides"
    ):
        assert_parity(
            functools.partial(Mixture, Sorted), batch, MeshLayout(shard=2, ep=2), tp_plan=rules
        )


class Counting(Batched):
    """Experts whose forward needs all of them."""

    def forward(self, hidden, index, weights):
        assert self.up.shape[0] == 4
        return super().forward(hidden, index, weights)


def test_a_call_of_its_own() -> None:
    rules = {"layers.*.experts": ep.Experts(call=Batched.forward)}
    build = functools.partial(Mixture, Counting)
    layout = MeshLayout(shard=4, ep=2)
    found = assert_parity(build, batch, layout, loss=loss, tp_plan=rules, steps=2, fp32=False)
    assert found.grads["float64"] < 1e-12
