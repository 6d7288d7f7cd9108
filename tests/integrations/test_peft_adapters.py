"""peft: gradients of adapters on real ranks, and folders that plain peft writes and loads."""

import json
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("peft")

import torch
from _support.integrations.peft_rows import (
    FAMILIES,
    MESHES,
    adapted,
    base,
    batch,
    bnb4,
    double,
    fill,
    loss_of,
    nf4,
    ours,
    trained,
)
from _support.integrations.rows import whole
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn

from parallel3d import (
    CheckpointError,
    MeshLayout,
    Parallel3dError,
    PlanError,
    build_mesh,
    checkpoint,
    materialize,
    parallelize,
)
from parallel3d.checkpoint import load_hf, load_peft, save_hf, save_peft
from parallel3d.fsdp import FSDPModule
from parallel3d.testing import GlooPool, fake_world
from parallel3d.tp import resolve_plan

pytestmark = pytest.mark.ci

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def gradients(name: str, mesh: tuple[int, int, int]) -> None:
    """Compares loss and gradients in one step of a family, or of a variant of Llama's adapters."""
    family = name if name in FAMILIES else "llama"
    plain, model = ((adapted(name) if name in FAMILIES else variant(name)).double() for _ in "12")
    _, rows, _ = ours(model, mesh)
    with double(family):
        want = loss_of(plain, batch(0))
        want.backward()
        loss = loss_of(model, batch(0)[rows])
        loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / dist.get_world_size(), want.detach(), rtol=1e-9, atol=0)
    got = {name: whole(param.grad) for name, param in trained(model).items()}
    grads = {name: param.grad for name, param in trained(plain).items()}
    assert got.keys() == grads.keys()
    largest = max(grad.abs().max() for grad in grads.values())
    for name, grad in grads.items():
        assert grad.any(), name
        assert (got[name] - grad).abs().max() <= 1e-9 * largest, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *product(FAMILIES, MESHES),
        ("bias of the layers", (1, 2, 2)),
        ("all biases", (2, 2, 1)),
        ("modules to save", (1, 4, 1)),
        ("tokens", (1, 4, 1)),
        ("dora", (1, 4, 1)),
    ],
)
def test_gradients_are_plain_pefts(gloo_pool: GlooPool, name, mesh) -> None:
    """Also of what is trained beside adapters."""
    gloo_pool.run(gradients, name, mesh, world_size=4)


# Folders.

VARIANTS: dict[str, dict] = {
    "linear": {},
    "bias of the layers": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "biases of adapters": {"target_modules": ["q_proj"], "lora_bias": True},
}


def variant(name: str, *, tied: bool = False) -> nn.Module:
    model = base(attention_bias=True, tie_word_embeddings=tied)
    return adapted(model=model, **VARIANTS[name])


def same_folders(one: Path, two: Path) -> None:
    a, b = load_file(one / FILE), load_file(two / FILE)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name
    assert config_in(one) == config_in(two)


def config_in(folder: Path) -> dict:
    """The config, with lists that are sets in peft in one order."""
    config = json.loads((folder / CONFIG).read_text())
    return {k: sorted(v) if isinstance(v, list) else v for k, v in config.items()}


FAST = ("linear", "embedding", "modules to save")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS]
)
def test_a_plain_models_folder_is_that_of_peft(tmp_path: Path, name: str) -> None:
    model = variant(name, tied=name == "modules to save")
    model.save_pretrained(tmp_path / "theirs")
    save_peft(tmp_path / "ours", model)
    same_folders(tmp_path / "ours", tmp_path / "theirs")
    other = variant(name, tied=name == "modules to save")
    with torch.no_grad():
        for param in trained(other).values():
            param.zero_()
    load_peft(tmp_path / "theirs", other)
    for key, value in get_peft_model_state_dict(other).items():
        assert torch.equal(value, get_peft_model_state_dict(model)[key]), key


def test_several_adapters(tmp_path: Path) -> None:
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    fill(model, seed=5)
    model.save_pretrained(tmp_path / "theirs")
    save_peft(tmp_path / "one", model)
    save_peft(tmp_path / "two", model, adapter_name="other")
    same_folders(tmp_path / "one", tmp_path / "theirs")
    same_folders(tmp_path / "two", tmp_path / "theirs" / "other")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fill(model, seed=6)
    load_peft(tmp_path / "two", model, adapter_name="other")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == ("lora_" not in name or ".other" in name), name
    with pytest.raises(CheckpointError, match="no adapter 'third'; it has default, other"):
        load_peft(tmp_path / "two", model, adapter_name="third")


def on_ranks(folder: Path, name: str, mesh: tuple[int, int, int]) -> None:
    """Saves, loads what plain peft wrote, and marks each rank's slices."""
    plain = variant(name)
    model, _, _ = ours(variant(name), mesh)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "theirs")
    save_peft(folder / "ours", model)
    same_folders(folder / "ours", folder / "theirs")

    marked = trained(model)
    with torch.no_grad():
        for param in marked.values():  # replicas have one mark
            where = zip(param.placements, param.device_mesh.get_coordinate(), strict=True)
            own = sum(10**i * (c + 1) for i, (p, c) in enumerate(where) if not p.is_replicate())
            param.to_local().fill_(float(own))
    want = {name: whole(param) for name, param in marked.items()}
    save_peft(folder / "marked", model)
    loaded = PeftModel.from_pretrained(base(attention_bias=True), str(folder / "marked"))
    stored = dict(loaded.named_parameters())
    marks: set[float] = set()
    for key, value in want.items():
        assert torch.equal(stored[key], value), key
        marks |= {*value.unique().tolist()}
    assert len(marks) >= dist.get_world_size() // MeshLayout(*mesh).replicate

    load_peft(folder / "theirs", model)
    for key, param in trained(model).items():
        assert torch.equal(whole(param), dict(plain.named_parameters())[key]), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("linear", (1, 2, 2)),
        ("linear", (2, 1, 2)),
        ("linear", (1, 4, 1)),
        ("embedding", (1, 2, 2)),
        ("all biases", (1, 4, 1)),
        ("modules to save", (2, 2, 1)),
        ("dora", (1, 4, 1)),
    ],
)
def test_whole_adapters_from_every_mesh(gloo_pool: GlooPool, tmp_path: Path, name, mesh) -> None:
    gloo_pool.run(on_ranks, tmp_path, name, mesh, world_size=4)


def refusals(folder: Path) -> None:
    """Each is raised on every rank, and leaves the model as it was."""
    model = variant("linear")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    ours(model, (1, 1, 2))
    before = {name: whole(param) for name, param in model.named_parameters()}
    rank = dist.get_rank()

    def refused(what: str, config: PeftConfig | None = None, **change) -> None:
        path = folder / what.replace(" ", "_")[:20]
        if rank == 0:
            other = get_peft_model(
                base(attention_bias=True), config or variant("linear").peft_config["default"]
            )
            other.save_pretrained(path)
            tensors = load_file(path / FILE)
            for name in [n for n in tensors if change.get("drop", "-") in n]:
                del tensors[name]
            if change.get("add"):
                tensors[change["add"]] = torch.zeros(1)
            save_file(tensors, path / FILE)
        dist.barrier()
        with pytest.raises(CheckpointError, match=what):
            load_peft(path, model)

    targets = FAMILIES["llama"][2]
    refused(
        r"is \(5, 16\)|in the model and \(5, 16\)",
        LoraConfig(r=5, lora_alpha=6, target_modules=targets),
    )
    refused(
        "lora_alpha is 7 in .*, and 6 in the model",
        LoraConfig(r=3, lora_alpha=7, target_modules=targets),
    )
    refused("peft_type is 'IA3'", IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    refused(
        "not in the files: .*layers.1.self_attn.q_proj.lora_A",
        drop="layers.1.self_attn.q_proj.lora_A",
    )
    refused("in the files, but not in the model: .*odd", add="odd")
    with pytest.raises(CheckpointError, match="it holds nothing"):
        load_peft(folder / "absent", model)
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "mine.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"holds mine.txt, which save_peft did not write"):
        save_peft(folder / "full", model)
    with pytest.raises(CheckpointError, match="adapter_name differs"):
        save_peft(folder / "new", model, adapter_name="default" if rank else "other")
    assert not (folder / "new").exists()
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), before[name]), name


@pytest.mark.slow
def test_refused_on_every_rank(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(refusals, tmp_path, world_size=2)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is a LlamaForCausalLM, not one of peft's.* save_hf"
    ):
        save_peft(tmp_path / "a", base())
    prompts = get_peft_model(
        base(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(
        CheckpointError, match=r"PROMPT_TUNING, stores 'prompt_embeddings'.*only=\"trainable\""
    ):
        save_peft(tmp_path / "a", prompts)
    with torch.device("meta"):
        meta = adapted(target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"lora_A.* is on meta.* load_hf"):
        save_peft(tmp_path / "a", meta)


def test_the_same_weights_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    targets = FAMILIES["llama"][2]
    get_peft_model(base(), LoHaConfig(r=2, alpha=8, target_modules=targets)).save_pretrained(
        tmp_path / "loha"
    )
    model = get_peft_model(base(), LoHaConfig(r=2, alpha=32, target_modules=targets))
    with pytest.raises(CheckpointError, match=r"alpha is 8 in .*, and 32 in the model"):
        load_peft(tmp_path / "loha", model)
    get_peft_model(base(), LoraConfig(r=3, target_modules=targets)).save_pretrained(
        tmp_path / "lora"
    )
    path = tmp_path / "lora" / CONFIG
    config = json.loads(path.read_text())
    del config["use_rslora"], config["alpha_pattern"]  # as of a peft that had neither
    path.write_text(json.dumps(config))
    load_peft(tmp_path / "lora", get_peft_model(base(), LoraConfig(r=3, target_modules=targets)))
    model = get_peft_model(base(), LoraConfig(r=3, use_rslora=True, target_modules=targets))
    with pytest.raises(CheckpointError, match=r"use_rslora is False in .*, and True in the model"):
        load_peft(tmp_path / "lora", model)


# The base model.


@pytest.mark.parametrize("tied", [False, True])
def test_the_base_is_loaded_into_a_model_of_peft(tmp_path: Path, tied: bool) -> None:
    """Also into what peft copies, from meta; adapters get the values of materialize."""
    given = base(tie_word_embeddings=tied)
    with torch.no_grad():
        for param in given.parameters():
            param.add_(torch.randn(param.shape))
    save_hf(tmp_path, given)
    want = given.state_dict()
    config = LoraConfig(
        target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head", "norm"]
    )
    with torch.device("meta"):
        model = base(tie_word_embeddings=tied)
    model = get_peft_model(model, config)
    assert all(param.is_meta for param in model.parameters())
    with fake_world(0, 1):
        mesh = build_mesh(MeshLayout(), device_type="cpu")
        parallelize(model, mesh)
        assert load_hf(tmp_path, model) == ([], [])
    state = {name: whole(value) for name, value in model.state_dict().items()}
    head, norm = "base_model.model.lm_head.", "base_model.model.model.norm."
    for key in ("original_module.weight", "modules_to_save.default.weight"):
        assert torch.equal(state[head + key], want["lm_head.weight"])
        assert torch.equal(state[norm + key], want["model.norm.weight"])
    for name, value in want.items():
        names = [
            name,
            name.replace("weight", "base_layer.weight"),
            name.replace("weight", "original_module.weight"),
        ]
        (found,) = {f"base_model.model.{n}" for n in names} & state.keys()
        assert torch.equal(state[found], value), name
    config = LoraConfig(target_modules=config.target_modules)
    fresh = get_peft_model(base(tie_word_embeddings=tied).to("meta"), config)
    materialize(fresh, device="cpu", seed=0)
    for name, value in fresh.state_dict().items():
        if "lora_" in name:
            assert torch.equal(state[name], value), name


def test_the_base_is_loaded_strictly(tmp_path: Path) -> None:
    save_hf(tmp_path, base(num_hidden_layers=1))
    model = adapted(target_modules=["q_proj"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"not in the files: 'model.layers.1.input_layernorm"):
        load_hf(tmp_path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_hf(tmp_path, model, strict=False)


# QLoRA.


def int8() -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    model = base(hidden_size=64, intermediate_size=64)
    layer = Linear8bitLt(64, 64, False, has_fp16_weights=False)
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    model.set_submodule("model.layers.0.mlp.up_proj", layer.to("cpu"))
    return model


def unquantised() -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    model = base(hidden_size=64, intermediate_size=64)
    model.set_submodule("model.layers.0.mlp.up_proj", Linear4bit(64, 64, False))
    return model


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("build", "why"),
    [
        (int8, "Int8Params of bitsandbytes, .* every rank would keep it all"),
        (unquantised, r"Params4bit of bitsandbytes, which is not quantised yet; call model.to\("),
        (
            lambda: bnb4(torch.float32, storage=torch.float32),
            "dtype torch.float32, .*set quant_storage=torch.uint8",
        ),
    ],
)
def test_weights_of_bitsandbytes_that_can_not_be_sharded(build, why: str, rank: int) -> None:
    model = build()
    before = dict(model.named_parameters())
    with fake_world(rank, 2):
        mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
        with pytest.raises(
            Parallel3dError, match=rf"parameter .*up_proj.*{why}.*NF4|q_proj.*{why}.*NF4"
        ):
            parallelize(model, mesh)
    assert all(before[name] is param for name, param in model.named_parameters())
    assert not isinstance(model, FSDPModule)


@pytest.mark.parametrize(("build", "kind"), [(nf4, "NF4Tensor"), (bnb4, "Params4bit")])
def test_packed_weights_are_not_split_over_tp(build, kind: str) -> None:
    model = build(torch.float32)
    with pytest.raises(PlanError, match=rf"q_proj.base_layer.weight is a {kind}.* Use tp=1"):
        resolve_plan(model, "auto", 2)
    rule = {"*.*.model.layers.*.self_attn.q_proj": "colwise"}
    with pytest.raises(PlanError, match=rf"q_proj.base_layer' as Colwise.*{kind}.*leave the rule"):
        resolve_plan(model, rule, 2)


@pytest.mark.parametrize(("build", "kind"), [(nf4, "NF4Tensor"), (bnb4, "Params4bit")])
def test_packed_weights_are_sharded_and_only_their_adapters_saved(
    tmp_path: Path, build, kind: str
) -> None:
    plain = build(torch.float32)
    with fake_world(1, 2):
        model = build(torch.float32)
        parallelize(model, build_mesh(MeshLayout(shard=2), device_type="cpu"))
        packed = model.get_submodule(
            "base_model.model.model.layers.0.mlp.up_proj.base_layer"
        ).weight
        local = packed.to_local()
        values = getattr(local, "quantized_data", local)
        given = plain.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer").weight
        whole_values = getattr(given, "quantized_data", given.data)
        assert torch.equal(values, whole_values.chunk(2)[1])
    with fake_world(0, 1):
        model = build(torch.float32)
        parallelize(model, build_mesh(MeshLayout(), device_type="cpu"))
        with pytest.raises(
            CheckpointError, match=rf"q_proj.base_layer.weight is a {kind}.*trainable"
        ):
            checkpoint.save(tmp_path / "whole", model, step=1)
        with pytest.raises(
            CheckpointError, match=rf"is a {kind}.* save_peft writes adapters alone"
        ):
            save_hf(tmp_path / "hf", model)
        save_hf(tmp_path / "base", base(hidden_size=64, intermediate_size=64))
        with pytest.raises(CheckpointError, match=rf"is a {kind}.* load first, quantise then"):
            load_hf(tmp_path / "base", model)
        save_peft(tmp_path / "adapters", model)
        fill(plain, seed=8)
        load_peft(tmp_path / "adapters", plain)
        for name, param in trained(plain).items():
            assert torch.equal(param, whole(dict(model.named_parameters())[name])), name
