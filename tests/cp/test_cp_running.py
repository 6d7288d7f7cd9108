"""A context-parallel model in use: evaluation, recomputation, losses, and calls that are errors."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from _support.cp.models import Lm, batches, hf_loss, hf_model, layout_of, parity
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.cp import ContextParallel
from parallel3d.errors import Parallel3dError, PlanError, StateError
from parallel3d.fsdp import FSDPModule
from parallel3d.testing import assert_parity, record_collectives
from parallel3d.testing.parity import shards_of
from parallel3d.testing.worlds import fake_world


def both(world, build, **options):
    """The plain model, and the parallel one."""
    with world.paused():
        torch.manual_seed(0)
        plain = build()
        parallel = copy.deepcopy(plain)
    return plain, p3d.parallelize(parallel, world.mesh, **options)


def on_ranks(world, batch):
    """A batch made outside the simulation, on all ranks."""
    return {name: world.map(lambda _, t=t: t) for name, t in batch.items()}


def sample(world, length, number=0, **options):
    """A batch made outside the simulation."""
    with world.paused():
        return batches(length, **options)(number)


def whole_and_cut(world):
    """Token ids on all ranks, and their parts."""
    ids = on_ranks(world, sample(world, 16))["input_ids"]
    return ids, p3d.cp.shard_batch({"input_ids": ids}, world.mesh)["input_ids"]


def check_gradients(world, parallel, plain, divided=1, **tolerances):
    """Those of the parts are the plain model's, divided by a number."""
    for name, param in parallel.named_parameters():
        for _, box, part in shards_of(param.grad):
            with world.paused():
                want = plain.get_parameter(name).grad[box] / divided
                torch.testing.assert_close(part, want, msg=name, **tolerances)


def test_evaluation(world) -> None:
    """Whole sequences in eval mode: every rank computes all. Cut ones: their part."""
    plain, parallel = both(world, lambda: Lm().double())
    with world.paused():
        batch = batches(13)(0)
        expected = plain(batch["input_ids"])
    ids = on_ranks(world, batch)["input_ids"]
    parallel.eval()
    with torch.no_grad():
        whole = parallel(ids)
        cut = p3d.cp.shard_batch({"input_ids": ids}, world.mesh)
        logits = parallel(cut["input_ids"])
        assert logits.shape[1] == 8
        joined = p3d.cp.gather(logits, world.mesh, like=cut)
    with world.paused():
        for found in (whole, joined):
            for each in world.per_rank(found):
                assert torch.allclose(each, expected, rtol=0, atol=1e-12)
    assert p3d.cp.summary(parallel).startswith(
        "cp=2: ulysses in layers.*: cp=2 divides the 4 heads"
    )
    assert p3d.cp.summary(plain) == "no context parallelism"


def test_inputs_that_were_not_cut(world) -> None:
    _, parallel = both(world, Lm)
    ids, cut = whole_and_cut(world)
    with pytest.raises(StateError, match=r"not from p3d.cp.shard_batch, and the mesh has cp=2"):
        parallel(ids)
    with pytest.raises(StateError, match=r"not from p3d\.cp\.shard_batch"):
        parallel(cut.clone())  # nobody knows what it is a part of
    parallel(cut)
    with pytest.raises(StateError, match="called outside the model's forward, with gradients"):
        parallel.layers[0](torch.zeros(2, 8, 32))
    part = cut[:, :4]
    vars(part).update(vars(cut))  # as if it were all that shard_batch has returned
    with pytest.raises(StateError, match="4 tokens, but this rank's part of the sequences has 8"):
        parallel(part)


class WithLabels(Lm):
    """It shifts labels itself, which is wrong on a part of a sequence."""

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_inputs_that_were_not_checked(world) -> None:
    """What a model does with an optional input is not known, unless the example has it."""
    _, parallel = both(world, WithLabels)
    ids = on_ranks(world, sample(world, 16))["input_ids"]
    ids, labels = p3d.cp.shard_batch((ids, ids), world.mesh)
    parallel(ids)
    for args, kwargs in (((ids, labels), {}), ((ids,), {"labels": labels})):
        with pytest.raises(
            StateError, match="gets 'labels', and was checked with 'input_ids' only"
        ):
            parallel(*args, **kwargs)
    with world.paused():
        model, whole = WithLabels(), torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(PlanError, match="takes some positions of the sequence, by slice"):
        p3d.parallelize(model, world.mesh, example=((whole, whole), {}))


@pytest.mark.ci
@pytest.mark.parametrize("way", ["in turn", "later", "other order", "in one backward"])
def test_recomputation_knows_its_batch(world, way) -> None:
    """Blocks of one batch are recomputed after the forward of another with other documents."""
    pytest.importorskip("transformers")
    plain, parallel = both(world, lambda: hf_model("llama"), activation_checkpointing=True)
    samples = sample(world, 12), sample(world, 12, 1, documents=(5, 7))
    with world.paused():
        for each in samples:
            hf_loss(plain, **each).backward()
    cut = [p3d.cp.shard_batch(on_ranks(world, each), world.mesh) for each in samples]
    if way == "in turn":
        for batch in cut:
            hf_loss(parallel, **batch).backward()
    else:
        losses = [hf_loss(parallel, **batch) for batch in cut]
        if way == "in one backward":
            (losses[0] + losses[1]).backward()
        else:
            for loss in losses if way == "later" else losses[::-1]:
                loss.backward()
    check_gradients(world, parallel, plain, rtol=0, atol=1e-6)


def test_recomputation_of_an_unknown_batch(world) -> None:
    """A backward that begins inside the model doesn't say whose blocks it recomputes."""
    _, parallel = both(world, Lm, activation_checkpointing=True)
    kept = []
    parallel.layers[1].register_forward_hook(lambda _m, _a, output: kept.append(output))
    parallel(whole_and_cut(world)[1])
    with pytest.raises(StateError, match="did not begin at an output of the model"):
        kept[0].sum().backward()


def test_logits_changed_in_place(world) -> None:
    """They are a view; the batch of what is recomputed is known all the same."""
    plain, parallel = both(world, lambda: Lm().double(), activation_checkpointing=True)
    _, cut = whole_and_cut(world)
    parallel(cut).relu_().sum().backward()
    with world.paused():
        plain(sample(world, 16)["input_ids"]).relu_().sum().backward()
    # cp ranks share sequences; the sum over positions is the mean's times their number.
    check_gradients(world, parallel, plain, divided=2, rtol=1e-9, atol=1e-9)


def test_global_mean() -> None:
    """Ranks with other numbers of labels: the mean is over all tokens of all ranks."""
    batch = batches(14, padding=5)
    layout = MeshLayout(shard=2, cp=2)

    counts = [int((batch(i)["labels"][:, 1:] != -100).sum()) for i in range(2)]
    assert counts == [20, 20]

    def loss(model, **inputs):
        labels = inputs.get("shift_labels")
        if labels is None:
            ends = inputs["labels"].new_full((2, 1), -100)
            labels = torch.cat([inputs["labels"][:, 1:], ends], 1)
        logits = model(inputs["input_ids"])
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if isinstance(model, FSDPModule):
            return p3d.optim.global_mean(total, (labels != -100).sum())
        return total / 20

    assert_parity(Lm, batch, layout, loss=loss, shard_batch=p3d.cp.shard_batch, fp32=False, steps=1)


def test_a_copy_has_a_state_of_its_own(world) -> None:
    _, parallel = both(world, lambda: Lm().double())
    copied = copy.deepcopy(parallel)
    _, cut = whole_and_cut(world)
    first, second = parallel(cut), copied(cut)
    second.sum().backward()
    first.sum().backward()
    for one, two in zip(parallel.parameters(), copied.parameters(), strict=True):
        for (_, _, a), (_, _, b) in zip(shards_of(one.grad), shards_of(two.grad), strict=True):
            with world.paused():
                assert torch.equal(a, b)


def test_refused_models_stay_plain(world) -> None:
    with world.paused():
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.GRU(4, 4, batch_first=True))
    before = {k: type(m) for k, m in model.named_modules()}
    with pytest.raises(PlanError, match="context parallelism: '1'"):
        p3d.parallelize(model, world.mesh)
    assert {k: type(m) for k, m in model.named_modules()} == before
    assert not any("_parallel3d_cp" in vars(m) for m in model.modules())
    with pytest.raises(Parallel3dError, match="kind is 'tree'"):
        p3d.parallelize(Lm(), world.mesh, context_parallel="tree")


@pytest.mark.ci
def test_configs_are_the_models_own(world) -> None:
    """Another model of the same config, and one built from the parallel model's, stay plain."""
    pytest.importorskip("transformers")
    plain, parallel = both(world, lambda: hf_model("llama"))
    assert plain.config._attn_implementation == "sdpa"
    assert "parallel3d" not in str(parallel.config.to_dict())
    with world.paused():
        again = type(plain)(parallel.config).double()
        again.load_state_dict(plain.state_dict())
        batch = batches(12)(0)
        assert torch.equal(hf_loss(again, **batch), hf_loss(plain, **batch))


# ---- blocks recomputed under context parallelism: right, and selectively without a second message ----


KINDS = ("ulysses", "gather", "ring")


def messages(kind: Any, how: Any, *, mask: bool = False) -> Counter[str]:
    """Operation -> how often it was issued over cp in a training step, on a rank of (1, 1, 4, 1)."""
    layout = layout_of((1, 1, 4, 1))
    with fake_world(1, 4):
        mesh = p3d.build_mesh(layout, device_type="cpu")
        torch.manual_seed(0)
        model = p3d.parallelize(
            Lm(),
            mesh,
            example=((torch.ones(2, 16, dtype=torch.int64),), {}),
            context_parallel=ContextParallel(kind),
            activation_checkpointing=how,
        )
        ids = torch.arange(32).view(2, 16)
        given = {"key_mask": ids > 3} if mask else {}
        ids, labels = p3d.cp.shard_batch((ids, ids), mesh, **given)
        with record_collectives(mesh) as recorder:
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    return Counter(call.op for call in recorder.calls if call.axis == "cp")


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("ulysses", True),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS[1:]),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_selectively_nothing_is_sent_again(kind: Any, mask: bool) -> None:
    plain = messages(kind, False, mask=mask)
    assert plain and messages(kind, "selective", mask=mask) == plain
    assert messages(kind, True, mask=mask).total() > plain.total()  # it sends again


@pytest.mark.parametrize("how", [pytest.param(True, marks=pytest.mark.slow), "selective"])
@pytest.mark.parametrize(
    "kind", [k if k == "ring" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_parity(kind: Any, how: Any) -> None:
    options = {"context_parallel": kind, "activation_checkpointing": how}
    parity(Lm, batches(13), (1, 1, 2, 1), **options)
