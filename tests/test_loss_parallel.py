"""``parallelize(..., loss_parallel=...)``: the plain model's loss and gradients, without its whole logits."""

import functools
import itertools

import pytest
import torch
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens
from _support.tp.largest import Largest
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.errors import Parallel3dError, PlanError, StateError
from parallel3d.fsdp import MixedPrecisionPolicy
from parallel3d.testing import assert_parity, record_collectives
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import Colwise, VocabLogits, vocab_parallel_cross_entropy
from parallel3d.tp.vocab_parallel import vocab_logits

VOCAB = (
    67  # what no tp divides (complaint 18 of docs/tensor_parallel.md); see tests/tp/test_tp_loss.py
)
MODES = [True, "chunked"]
build = functools.partial(Lm, vocab=VOCAB)
batch = functools.partial(tokens, vocab=VOCAB)


@pytest.fixture
def no_gather(monkeypatch):
    """Fails where logits are gathered; yields how often a loss took them as they are."""
    losses = []
    inner = vocab_logits._Loss.forward

    def refuse(*_):
        raise AssertionError("the logits were gathered")

    def counted(*args):
        losses.append(args[1])
        return inner(*args)

    monkeypatch.setattr(vocab_logits, "_gathered", refuse)
    monkeypatch.setattr(vocab_logits._Loss, "forward", staticmethod(counted))
    return losses


def parity(mode, mesh, tied=False, **options) -> None:
    """One step of a model with this loss, or more."""
    layers = options.pop("layers", 2)
    given = {"loss": lm_loss, "tp_plan": LM_PLAN, "steps": 1, "fp32": False, **options}
    make = functools.partial(build, tied=tied, layers=layers)
    assert_parity(make, batch, MeshLayout(*mesh), loss_parallel=mode, **given)


MESHES = [(1, 1, 2), (1, 2, 2), (2, 1, 2)]
WAYS = list(itertools.product(MODES, MESHES, [False, True]))
ORDINARY = [
    (True, (1, 1, 2), False),
    (True, (1, 2, 2), True),
    ("chunked", (1, 2, 2), False),
    ("chunked", (2, 1, 2), True),
]


@pytest.mark.parametrize(
    ("mode", "mesh", "tied"),
    [way if way in ORDINARY else pytest.param(*way, marks=pytest.mark.full) for way in WAYS],
    ids=str,
)
def test_parity(mode, mesh, tied, no_gather):
    parity(mode, mesh, tied, steps=2, fp32=True)
    assert no_gather


ENGINE = {
    "accumulation": {"micro_batches": 2, "mesh": (2, 2, 2)},
    "no sync": {"micro_batches": 2, "defer": "sync", "mesh": (2, 1, 2)},
    "checkpointing": {"activation_checkpointing": True},
    "sequence parallel": {"tp_plan": SEQUENCE_PLAN},
    "blocks stay gathered": {"reshard_after_forward": False},
    "HFSDP": {"shard_optimizer_over_replicate": True, "mesh": (2, 1, 2)},
}


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[pytest.mark.full] if tied != (i % 2 == 0) else [])
        for i, name in enumerate(ENGINE)
        for tied in (False, True)
    ],
)
def test_chunked_with_the_engine(name, tied, no_gather):
    """The head's weight is read, and its gradient arrives, when its unit's forward is long over."""
    parity("chunked", **{"mesh": (1, 2, 2), "tied": tied, "layers": 1, **ENGINE[name]})
    assert no_gather


@pytest.mark.parametrize(
    ("mode", "plan", "tied"),
    [(True, LM_PLAN, False), ("chunked", None, False), ("chunked", LM_PLAN, True)],
)
def test_without_tp(mode, plan, tied, no_gather):
    parity(mode, (1, 2, 1), tied, tp_plan=plan)
    assert bool(no_gather) == (mode == "chunked")


def two_passes(model: nn.Module, ids: Tensor) -> Tensor:
    """Two forwards before one backward, and the same logits in two losses."""
    first, second = model(ids), model(ids.flip(1))
    loss = F.cross_entropy(first.flatten(0, 1), ids.flatten())
    loss = loss + F.cross_entropy(second.transpose(1, 2), ids, label_smoothing=0.1)
    return loss + F.cross_entropy(torch.tanh(first / 2)[:, 1:].flatten(0, 1), ids[:, 1:].flatten())


def values_too(model: nn.Module, ids: Tensor) -> Tensor:
    """A loss and something that needs the whole logits."""
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


def with_z_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The function takes plain logits too."""
    logits = model(ids) / 2
    loss = vocab_parallel_cross_entropy(logits[:, :-1], ids[:, 1:], z_loss=1e-2)
    logits *= 2  # from here on they are plain
    return loss + vocab_parallel_cross_entropy(logits, ids)


@pytest.mark.parametrize("loss", [two_passes, values_too, with_z_loss])
@pytest.mark.parametrize(("mode", "tied"), [(True, False), ("chunked", True)])
def test_other_losses(loss, mode, tied):
    parity(mode, (1, 2, 2), tied, loss=loss)


def parallel(mode=True, tp=2, plan=LM_PLAN, model=None, **options):
    mesh = build_mesh(MeshLayout(1, 1, tp), device_type="cpu")
    return parallelize(model or build(), mesh, plan, loss_parallel=mode, **options), mesh


@pytest.mark.parametrize("mode", MODES)
def test_what_is_communicated(mode):
    """A gather of 2 x 5 x 68 logits less than without loss parallel; sums of 10 and 20 numbers more."""
    calls = {}
    for which in (False, mode):
        with fake_world(0, 2):
            model, mesh = parallel(which)
            ids = batch(0)
            with record_collectives(mesh) as recorder:
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            calls[which] = [(c.op, c.bytes) for c in recorder.calls]
    gather = ("all_gather", 2 * 5 * 68 * 4)
    sums = [("all_reduce", 10 * 4), ("all_reduce", 2 * 10 * 4)]
    assert calls[False].count(gather) == 1
    assert gather not in calls[mode]
    assert sorted(calls[mode]) == sorted([c for c in calls[False] if c != gather] + sums)


@pytest.mark.parametrize("mode", MODES)
def test_mixed_precision_and_the_cast_of_outputs(mode):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    grads = {}
    for which in (False, mode):
        torch.manual_seed(0)
        with fake_world(0, 1):
            plan = LM_PLAN if which else None
            mesh = build_mesh(MeshLayout(1, 1, 1), device_type="cpu")
            model = parallelize(build(), mesh, plan, mp_policy=policy, loss_parallel=which)
            logits = model(batch(0))
            assert logits.dtype is torch.float32
            loss = F.cross_entropy(logits.flatten(0, 1), batch(0).flatten())
            assert loss.dtype is torch.float32
            loss.backward()
            grads[which] = [loss.detach(), *(p.grad.to_local() for p in model.parameters())]
    for got, want in zip(grads[mode], grads[False], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)


def test_the_subclass_survives_the_cast_of_outputs():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for mode in MODES:
        with fake_world(0, 2):
            model, _ = parallel(mode, mp_policy=policy)
            logits = model(batch(0))
            assert isinstance(logits, VocabLogits)
            assert (logits.dtype, logits.shape) == (torch.float32, (2, 5, VOCAB))


def test_chunked_in_evaluation_is_split():
    """The weight is freed when the head's forward ends; the logits must be there by then."""
    with fake_world(0, 2):
        model, _ = parallel("chunked")
        with torch.no_grad():
            logits = model(batch(0))
            assert isinstance(logits, VocabLogits)
            F.cross_entropy(logits.flatten(0, 1), batch(0).flatten())
            assert logits[:, -1].argmax(-1).shape == (2,)


@pytest.mark.parametrize("tp", [1, 2])
def test_chunked_never_holds_the_logits_of_a_training_step(tp):
    ids = torch.randint(0, 500, (4, 256))
    most = {}
    for mode in (False, "chunked"):
        with fake_world(0, tp):
            model, _ = parallel(mode, tp, model=Lm(dim=8, hidden=16, layers=1, vocab=500))
            with Largest() as largest:
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            most[mode] = largest.numel
    assert most[False] == 4 * 256 * 500
    assert most["chunked"] == 256 * 500 // tp


def test_freed_between_forward_and_loss_is_an_error():
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
        model = parallelize(build(), mesh, LM_PLAN, loss_parallel="chunked")
        logits = model(batch(0))
        model.head.reshard()
        with pytest.raises(StateError, match="after the head's weight was freed"):
            F.cross_entropy(logits.flatten(0, 1), batch(0).flatten())


def test_chunked_logits_are_gone_after_the_backward():
    """A step may have changed the weight: what would be computed now is not what the loss was of."""
    with fake_world(0, 1):
        model, _ = parallel("chunked", tp=1)
        logits = model(batch(0))
        F.cross_entropy(logits.flatten(0, 1), batch(0).flatten()).backward()
        with pytest.raises(StateError, match="logits were asked for after the backward"):
            logits.argmax(-1)


# ---- which module is the head ----


class TwoHeads(Lm):
    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)
        self.draft = nn.Linear(12, VOCAB)


class Says(TwoHeads):
    def get_output_embeddings(self) -> nn.Module:
        return self.draft


def headed(**plan) -> dict:
    return {k: v for k, v in LM_PLAN.items() if k != "head"} | plan


def test_heads_that_are_not_clear():
    both = headed(head="colwise_gather_output", draft="colwise_gather_output")
    for model, plan, message in (
        (build, headed(), "no linear layer with the style 'colwise_gather_output'.*'layers.0.up'"),
        (TwoHeads, both, "'head' and 'draft' may each be the output head.*get_output_embeddings"),
        (
            Says,
            LM_PLAN,
            "'draft' is the model's output head, but not a linear layer with the style",
        ),
    ):
        with fake_world(0, 2), pytest.raises(PlanError, match=message):
            parallel(True, plan=plan, model=model())


def test_the_model_says_which_head_it_is():
    plan = headed(head="colwise_gather_output", draft="colwise_gather_output")
    with fake_world(0, 2):
        model, _ = parallel(True, plan=plan, model=Says())
        assert type(model(batch(0))) is Tensor  # it calls the other
        assert isinstance(model.draft(torch.randn(2, 12)), VocabLogits)


def test_a_head_left_split_by_the_plan_counts_too():
    with fake_world(0, 2):
        model, _ = parallel(True, plan=headed(head=Colwise()))
        assert isinstance(model(batch(0)), VocabLogits)


def test_a_head_inside_a_block_can_not_be_chunked():
    with fake_world(0, 2), pytest.raises(PlanError, match="'head' lies in the block 'head'"):
        parallel("chunked", units=["layers.*", "head"])
    with fake_world(0, 2):
        parallel(True, units=["layers.*", "head"])


def test_a_value_that_can_not_be():
    with fake_world(0, 2), pytest.raises(Parallel3dError, match="loss_parallel is 'yes'"):
        parallel("yes")
