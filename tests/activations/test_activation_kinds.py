"""``parallelize(activation_checkpointing=...)`` on meshes: equal bits, and nothing sent again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from parallel3d import ActivationOffload, MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize
from parallel3d._util.forwards import wrap_forward
from parallel3d.activations.kinds import name_of
from parallel3d.activations.selective import keep_costly, partly_recomputed
from parallel3d.errors import StateError
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel, resolve_plan

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]


def matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wanted = op.overloadpacket.__name__ in ("mm", "addmm")
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, Any] = {
    "selective": "selective",
    "policy": matmuls,
    "offload": ActivationOffload(pool_gib=2**-6, min_kib=0),
}


class Drops(nn.Module):
    """A block with a fused layer on a gathered sequence, dropout on parts and on wholes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.fused(self.norm(x)))), 0.3, self.training)


class DropLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 8)
        self.layers = nn.ModuleList(Drops() for _ in range(2))
        self.head = nn.Linear(8, 19)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chunked() -> dict[str, Any]:
    return {
        "embed": VocabParallel(output="sequence"),
        "layers.*.norm": SequenceParallel(),
        "layers.*.fused": Colwise(input="sequence", chunks=2),
        "layers.*.down": Rowwise(output="sequence"),
        "head": Colwise(input="sequence", output="replicate"),
    }


CASES: dict[str, tuple[MeshLayout, Any, Callable[[], nn.Module], int]] = {
    "FSDP": (MeshLayout(1, 4, 1), None, Lm, 5),
    "HSDP": (MeshLayout(2, 2, 1), None, DropLm, 5),
    "tp": (MeshLayout(1, 2, 2), LM_PLAN, Lm, 5),
    "tp alone": (MeshLayout(1, 1, 3), LM_PLAN, Lm, 5),
    "sequence, uneven": (MeshLayout(2, 1, 2), SEQUENCE_PLAN, Lm, 5),
    "chunks": (MeshLayout(1, 2, 2), chunked(), DropLm, 6),
}


def trained(case: str, kind: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, int]]:
    """(all ranks' gradients after two steps, tp collectives in the second backward).

    Without dropout: where ranks are simulated, torch's checkpoint restores no rank's random state.
    """
    layout, plan, build, length = CASES[case]
    torch.manual_seed(0)
    model: Any = build().eval()
    samples = [tokens(step, length=length) for step in range(2)]
    with local_world(layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        parallelize(model, mesh, plan, mp_policy=policy, activation_checkpointing=kind)
        for step in range(2):
            loss = lm_loss(model, samples[step])
            with record_collectives(mesh) as sent:
                loss.backward()
        grads: list[Any] = [param.grad.to_local() for param in model.parameters()]
        ranks = [each for g in grads for each in getattr(g, "_local_tensors", {0: g}).values()]
        counts = {op: sent.count(op, "tp") for op in ("all_gather", "reduce_scatter", "all_reduce")}
        return [each.clone() for each in ranks], counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_and_nothing_sent_again(case: str, dtype: torch.dtype) -> None:
    plain, counts = trained(case, False, dtype)
    for name, kind in KINDS.items():
        found, sent = trained(case, kind, dtype)
        assert all(map(torch.equal, plain, found)), name
        assert sent == counts, name
    if CASES[case][1] not in (None, LM_PLAN):  # recomputation as a whole sends the sequence again
        _, sent = trained(case, True, dtype)
        assert sum(sent.values()) > sum(counts.values())


def with_dropout(case: str, dtype: torch.dtype) -> None:
    layout, plan, build, length = CASES[case]
    found: list[list[torch.Tensor]] = []
    for kind in (False, True, *KINDS.values()):
        torch.manual_seed(0)
        model: Any = build()
        mesh = build_mesh(layout, device_type="cpu")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        parallelize(model, mesh, plan, mp_policy=policy, activation_checkpointing=kind)
        torch.manual_seed(layout.data_rank(dist.get_rank()))
        for step in range(2):
            lm_loss(model, tokens(step, length=length)).backward()
        found.append([param.grad.to_local() for param in model.parameters()])
        drops = model(tokens(0, length=length))
        assert not torch.equal(drops, model.eval()(tokens(0, length=length)))
    for each in found[1:]:
        assert all(map(torch.equal, found[0], each))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["HSDP", "chunks"])
def test_the_same_bits_with_dropout(gloo_pool: Any, case: str, dtype: torch.dtype) -> None:
    gloo_pool.run(with_dropout, case, dtype, world_size=4)


@pytest.mark.parametrize("kind", ["selective", "offload"])
def test_parity_with_the_plain_model(kind: str) -> None:
    options = {"tp_plan": LM_PLAN, "loss": lm_loss, "activation_checkpointing": kind}
    assert_parity(Lm, tokens, MeshLayout(1, 2, 2), **options)


def test_the_vocabulary_parallel_loss_within_a_region() -> None:
    """Its two all-reduces, and those of the head, are not issued again."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = Lm()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return lm_loss(self.lm, ids) * 1.0

    counts, losses, ids = [], [], tokens(0)
    for policy in (None, keep_costly):
        torch.manual_seed(0)
        model = Loss()
        with local_world(2):
            mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
            plan = {f"lm.{name}": style for name, style in LM_PLAN.items()}
            parallelize(model, mesh, plan, loss_parallel=True, units=["lm.layers.*"])
            if policy is not None:
                wrap_forward(model, partly_recomputed(policy), ("test", policy))
            loss = model(ids)
            with record_collectives(mesh) as sent:
                loss.backward()
            counts.append(sent.count(axis="tp"))
            grads: list[Any] = [p.grad.to_local() for p in model.parameters()]
            losses.append([each for g in grads for each in g._local_tensors.values()])
    assert counts[0] == counts[1]
    assert all(map(torch.equal, *losses))


class Takes(nn.Linear):
    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        if past_key_values is not None:
            past_key_values.append(x)
        return torch.tanh(super().forward(x))


class KeyValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Takes(8, 8)])

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        return self.layers[0](x, past_key_values=past_key_values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_value_cache(kind: str) -> None:
    """Written in evaluation; in training the empty one is left out where blocks are recomputed."""
    with fake_world(0, 1):
        mesh = build_mesh(MeshLayout(), device_type="cpu")
        model = parallelize(KeyValues(), mesh, activation_checkpointing=KINDS[kind])
        x, cache = torch.randn(2, 8), []
        with torch.no_grad():
            model(x, past_key_values=cache)
        assert len(cache) == 1
        empty: list[Any] = []
        model(x, past_key_values=empty).sum().backward()
        assert len(empty) == (kind == "offload")
        if kind != "offload":
            with pytest.raises(StateError, match="past_key_values holds 1 tokens"):
                model(x, past_key_values=cache)


def test_names_that_ranks_compare() -> None:
    assert name_of(True) == "True" and name_of("selective") == "selective"
    named = f"{__name__}.matmuls"
    assert name_of(matmuls) == name_of(partial(matmuls)) == named
    assert name_of(ActivationOffload(1, 2)) == "ActivationOffload(pool_gib=1, min_kib=2)"


def test_the_torch_engine_recomputes_selectively(gloo_pool: Any) -> None:
    gloo_pool.run(on_torchs_engine, world_size=2)


def on_torchs_engine() -> None:
    found = []
    for kind in (False, "selective"):
        torch.manual_seed(0)
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model: Any = parallelize(Lm(), mesh, activation_checkpointing=kind, engine="torch")
        lm_loss(model, tokens(0)).backward()
        found.append([p.grad.to_local() for p in model.parameters()])
    assert all(map(torch.equal, *found))


# ---- compiled ----


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks(gloo_pool: Any, kind: str) -> None:
    gloo_pool.run(compiled, kind, world_size=1)


def compiled(kind: str) -> None:
    found = []
    for compile in (False, "aot_eager"):
        torch.manual_seed(0)
        mesh = build_mesh(MeshLayout(), device_type="cpu")
        model: Any = Lm()
        parallelize(model, mesh, activation_checkpointing=KINDS[kind], compile=compile)
        lm_loss(model, tokens(0)).backward()
        found.append([p.grad.to_local() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_what_a_compiled_backward_sends() -> None:
    """The graphs of a selective block's backward have the collectives of one that keeps everything."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    sent: dict[str, int] = {}
    for name, kind in {"all": False, "selective": "selective", "none": True}.items():
        graphs: list[Any] = []

        def note(gm: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(gm)
            return gm

        backend = aot_autograd(
            fw_compiler=lambda gm, inputs: gm,
            bw_compiler=note,
            partition_fn=min_cut_rematerialization_partition,
        )
        with fake_world(0, 2):
            torch._dynamo.reset()
            mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
            model = Lm(layers=1)
            resolve_plan(model, LM_PLAN, 2).apply(model, mesh)
            for param_owner in model.modules():
                for key, param in list(param_owner._parameters.items()):
                    local = getattr(param, "_local_tensor", param)
                    if param is not None:
                        param_owner._parameters[key] = nn.Parameter(local.detach())
            from parallel3d.activations.kinds import recompute_blocks

            recompute_blocks(list(model.layers), kind)
            block = model.layers[0]
            compiled_block = torch.compile(block, backend=backend)
            compiled_block(torch.randn(2, 5, 12, requires_grad=True)).sum().backward()
        sent[name] = sum(
            "all_reduce" in str(node.target) for gm in graphs for node in gm.graph.nodes
        )
    assert sent["selective"] == sent["all"]
