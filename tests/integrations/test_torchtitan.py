"""parallel3d.integrations.torchtitan: what its sharding says, on our mesh; its checkpointer on our model."""

import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torchtitan")
import torch
from _support.integrations.rows import apart, whole_weights
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow  # importing torchtitan alone takes seconds


def data_rank(sizes: tuple[int, int, int]) -> tuple[int, int]:
    layout = p3d.MeshLayout(*sizes)
    return layout.data_rank(dist.get_rank()), layout.data_size


def parallel(lib: Any, family: str, sizes: tuple[int, int, int], **options: Any) -> Any:
    build = {k: options.pop(k) for k in ("sequence", "tied") if k in options}
    model = lib.build(family, **build)
    mesh = p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")
    return p3d.parallelize(model, mesh, tp_plan=p3d.integrations.torchtitan.plan(model), **options)


def _checkpointer(folder: str) -> None:
    from _support.integrations import titan_programs as lib
    from torchtitan.components.checkpoint import CheckpointManager

    def manager(training: Any) -> Any:
        config = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0)
        return config.build(
            dataloader=None,
            model_parts=[training.model],
            optimizers=training.optimizers,
            lr_schedulers=training.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )

    with lib.titan():
        sizes = 1, 2, 2
        training = lib.Training(parallel(lib, "llama3", sizes), *data_rank(sizes))
        training.steps(5)
        saver = manager(training)
        saver.save(5)
        losses = training.steps(5, first=5)
        for then in ((1, 2, 2), (2, 2, 1)):
            model = parallel(lib, "llama3", then)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            resumed = lib.Training(model, *data_rank(then))
            assert manager(resumed).load(5)
            again = resumed.steps(5, first=5)
            weights = apart(whole_weights(model), whole_weights(training.model))
            if then == sizes:
                assert again == losses
                assert weights == 0
            else:
                assert weights < 1e-10, weights
        # Ours holds it too, on any mesh.
        p3d.checkpoint.save(
            f"{folder}/ours", training.model, training.optimizers.optimizers, step=10
        )
        alone = lib.build("llama3")
        p3d.checkpoint.load(f"{folder}/ours", alone)
        assert apart(whole_weights(alone), whole_weights(training.model)) == 0


def test_its_checkpointer_resumes_exactly(gloo_pool: GlooPool) -> None:
    folder = tempfile.mkdtemp()
    try:
        gloo_pool.run(_checkpointer, folder, world_size=4, timeout=280)
        assert Path(folder, "checkpoint", "step-5", ".metadata").exists()
    finally:
        shutil.rmtree(folder)


def _variants() -> None:
    from _support.integrations import titan_programs as lib
    from torch.nn import functional as F
    from torchtitan.components.optimizer import register_moe_load_balancing_hook
    from torchtitan.distributed import ParallelDims

    with lib.titan():
        sizes = 1, 2, 2
        rank, size = data_rank(sizes)
        # Experts whose routing is balanced by its hook, and tied weights.
        plain = lib.Training(lib.build("qwen3_moe", tied=True), 0, 1)
        model = parallel(lib, "qwen3_moe", sizes, tied=True)
        assert model.tok_embeddings.weight is model.lm_head.weight
        assert all(isinstance(layer, p3d.fsdp.FSDPModule) for layer in model.layers.values())
        ours = lib.Training(model, rank, size)
        alone = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)
        dims = ParallelDims(1, 2, 1, 2, 1, 1, 4, spmd_backend="partial_dtensor")
        for training, of in ((plain, alone), (ours, dims)):
            register_moe_load_balancing_hook(training.optimizers, [training.model], of)
            training.steps(4)
        assert apart(whole_weights(model), whole_weights(plain.model)) < 1e-10
        biases = [t.model.layers["0"].moe.expert_bias_E for t in (plain, ours)]
        assert biases[0].abs().max() > 1e-4
        torch.testing.assert_close(*biases)

        # Projections of their own, and norms on heads.
        plain = lib.Training(lib.build("qwen3"), 0, 1)
        ours = lib.Training(parallel(lib, "qwen3", sizes), rank, size)
        for training in (plain, ours):
            training.steps(4)
        weights = whole_weights(ours.model)
        assert any("attention.qkv_linear.wk" in name for name in weights)
        assert apart(weights, whole_weights(plain.model)) < 1e-10

        # Built on meta and initialized by its own functions.
        made = []
        for other in ((1, 2, 2), (2, 2, 1)):
            with torch.device("meta"):
                model = lib.llama_config(True).build()
            mesh = p3d.build_mesh(p3d.MeshLayout(*other), device_type="cpu")
            p3d.parallelize(model, mesh, tp_plan=p3d.integrations.torchtitan.plan(model))
            model.to_empty(device="cpu")
            torch.manual_seed(7)
            with torch.no_grad():
                model.init_states(buffer_device=torch.device("cpu"))
            made.append(whole_weights(model))
            assert lib.Training(model, *data_rank(other)).step(0) > 0
        for each in made:
            std = each["tok_embeddings.weight"].std().item()
            assert 0.25 < std < 0.35, std
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, each["lm_head.weight"])
            assert all(torch.equal(everyone[0], one) for one in everyone)

        # Logits that stay split, in a loop of one's own.
        ids = torch.arange(16).view(2, 8)
        whole = lib.build("llama3")
        want = F.cross_entropy(whole(ids).flatten(0, 1), ids.flatten())
        model = parallel(lib, "llama3", sizes, loss_parallel=True)
        logits = model(ids)
        assert type(logits).__name__ == "VocabLogits"
        torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), ids.flatten()), want)


def test_variants(gloo_pool: GlooPool) -> None:
    gloo_pool.run(_variants, world_size=4, timeout=280)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("sequence", [False, True])
def test_an_example_proves_the_plan(family: str, sequence: bool) -> None:
    from _support.integrations import titan_programs as lib

    example = (torch.zeros(2, 8, dtype=torch.long),), {}
    with mock.patch("torchtitan.distributed.utils._spmd_backend", "partial_dtensor"):
        model = lib.build(family, sequence)
        plan = p3d.integrations.torchtitan.plan(model)
        assert "Not checked" not in str(p3d.resolve_plan(model, plan, 2, example=example))


def test_what_has_no_translation() -> None:
    from _support.integrations import titan_programs as lib
    from torchtitan.models import deepseek_v3
    from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    plan = p3d.integrations.torchtitan.plan
    with lib.titan():
        bare = lib._config(lib.llama3, lib.llama3.Llama3Model, [], False).build()
        for what in (bare, torch.nn.Linear(2, 2), "llama3"):
            with pytest.raises(p3d.Parallel3dError, match=f"{type(what).__name__} has no sharding"):
                plan(what)
        with pytest.raises(p3d.PlanError, match=r"moe.* can't be translated: .*ep.* without tp"):
            plan(lib.qwen_config(True, ep=True).build())
        # Keys that all heads share go around its split projections: their gradients would be parts.
        config = deepseek_v3.deepseekv3_configs["debugmodel"]("flex", "standard")
        for sequence in (False, True):
            set_deepseek_v3_sharding_config(config, enable_sp=sequence, enable_ep=False)
            with (
                torch.device("meta"),
                pytest.raises(p3d.PlanError, match=r"attention .*is not known"),
            ):
                plan(config.build())
        config = lib.llama_config(True)
        config.layers[1].attention.wo.sharding_config.state_shardings["weight"] = config.layers[
            1
        ].attention.qkv_linear.wqkv.sharding_config.state_shardings["weight"]
        other = plan(config.build())  # layers that differ get rules of their own
        assert "layers.*.attention.wo" not in other
        assert {type(other[f"layers.{i}.attention.wo"]).__name__ for i in (0, 1)} == {
            "Rowwise",
            "Colwise",
        }
        config = lib.llama_config(False)
        set_llama3_sharding_config(config, enable_sp=True)
        bias = config.layers[0].attention_norm.sharding_config
        bias.in_src_shardings = None
        with pytest.raises(p3d.PlanError, match=re.escape("layers.0.attention_norm (RMSNorm)")):
            plan(config.build())
