"""Calls of a context-parallel model that would run other code than was checked, and models whose part of a
sequence tells nothing: errors, in place of other numbers."""

import pytest
import torch
from _support.cp.models import HIDDEN, VOCABULARY, Block, Lm, batches, hf_model, parity
from _support.hf.all_double import AllDouble
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d.cp.model import ContextParallel, plan_cp
from parallel3d.errors import PlanError, StateError

SIZES = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4, "num_hidden_layers": 1}


def parallel_and_batch(world, build, length=16):
    with world.paused():
        torch.manual_seed(0)
        model, batch = build(), batches(length)(0)
    parallel = p3d.parallelize(model, world.mesh)
    batch = {name: world.map(lambda _, t=t: t) for name, t in batch.items()}
    return parallel, p3d.cp.shard_batch(batch, world.mesh)


@pytest.mark.ci
def test_transformers_would_make_positions_and_labels_of_a_part(world) -> None:
    pytest.importorskip("transformers")
    parallel, cut = parallel_and_batch(world, lambda: hf_model("llama"))
    only = {name: cut[name] for name in ("input_ids", "position_ids", "attention_mask")}
    parallel(**only, use_cache=False)
    for name in ("position_ids", "attention_mask"):
        rest = {key: value for key, value in only.items() if key != name}
        with pytest.raises(StateError, match=rf"without '{name}'.*model\(\*\*batch\)"):
            parallel(**rest, use_cache=False)
    with pytest.raises(StateError, match="without 'num_items_in_batch', 'shift_labels'"):
        parallel(**only, labels=cut["labels"], use_cache=False)


@pytest.mark.ci
def test_transformers_options_of_the_call(world) -> None:
    transformers = pytest.importorskip("transformers")

    def build():
        config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
        config._experts_implementation = "eager"
        return transformers.MixtralForCausalLM(config).train()

    parallel, cut = parallel_and_batch(world, build)
    parallel(**cut, use_cache=False, output_router_logits=False, logits_to_keep=0)
    # The loss that balances experts is no mean over tokens; a rank's last positions are not the batch's.
    for option in ({"output_router_logits": True}, {"logits_to_keep": 4}):
        with pytest.raises(StateError, match=f"gets {next(iter(option))}=.*was checked with"):
            parallel(**cut, use_cache=False, **option)


@pytest.mark.ci
def test_transformers_loss_that_is_a_mean_over_a_part(world) -> None:
    transformers = pytest.importorskip("transformers")

    def build():
        config = transformers.LlamaConfig(**SIZES, num_labels=VOCABULARY)
        return transformers.LlamaForTokenClassification(config).train()

    parallel, cut = parallel_and_batch(world, build)
    names = ("input_ids", "position_ids", "attention_mask")
    parallel(**{name: cut[name] for name in names}, use_cache=False)
    with pytest.raises(StateError, match=r"doesn't read num_items_in_batch.*without labels"):
        parallel(**cut, use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_lora_of_peft(task) -> None:
    """Its model takes any arguments: the base model's are meant."""
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

    def build():
        options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        config = peft.LoraConfig(**options, task_type=task)
        return peft.get_peft_model(hf_model("llama"), config).double()

    with AllDouble():
        parity(build, batches(13), (1, 1, 2, 1), tp_plan=None)


class Targets(Lm):
    """As nanoGPT: logits of the last position only where there are no targets."""

    def forward(self, input_ids, targets=None, last=False):
        x = super().forward(input_ids)
        if targets is None or last:
            return x[:, [-1]]
        return F.cross_entropy(x.flatten(0, 1), targets.flatten())


def test_a_call_without_what_the_example_has(world) -> None:
    with world.paused():
        ids = torch.ones(2, 8, dtype=torch.int64)
        model = Targets()
    parallel = p3d.parallelize(model, world.mesh, example=((ids, ids), {}))
    cut = p3d.cp.shard_batch((ids, ids), world.mesh)
    parallel(*cut)
    with pytest.raises(StateError, match=r"without 'targets'.*an example=.* without them"):
        parallel(cut[0])
    with pytest.raises(StateError, match="gets last=True, and was checked with False"):
        parallel(*cut, last=True)


class Recomputed(Block):
    """Attention as ``attend`` gives it."""

    reentrant: bool | None = None

    def attend(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def forward(self, x):
        if self.reentrant is None:
            return x + self.attend(x)
        return x + checkpoint(self.attend, x, use_reentrant=self.reentrant)


def recomputed(reentrant: bool | None) -> Lm:
    model = Lm()
    model.layers = nn.ModuleList([Recomputed(HIDDEN, 4)])
    model.layers[0].reentrant = reentrant
    return model


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_with_attention_is_recomputed(world, reentrant) -> None:
    """Its recomputation would attend to this rank's part; also where it is switched on later."""
    with world.paused():
        model = recomputed(None)
        ids = torch.ones(2, 8, dtype=torch.int64)
    parallel = p3d.parallelize(model, world.mesh)
    parallel.layers[0].reentrant = reentrant
    with pytest.raises(PlanError, match=r"'layers.0' gives torch.utils.checkpoint a function"):
        parallel(p3d.cp.shard_batch(ids, world.mesh))
    with world.paused():
        model = recomputed(reentrant)
    with pytest.raises(PlanError, match="checkpoint modules instead"):
        plan_cp(model, ContextParallel())
