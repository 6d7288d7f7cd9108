"""Context parallelism of models on real processes."""

import pytest
from _support.cp.models import MESHES, Lm, batches, hf_loss, hf_model, parity

KINDS = ("ulysses", "gather", "ring")


def train(kind: str, sizes: tuple[int, int, int, int], options: dict) -> dict[str, float]:
    """Runs on every rank."""
    return parity(Lm, batches(13), sizes, context_parallel=kind, **options).grads


def train_hf(name: str, sizes: tuple[int, int, int, int], options: dict) -> dict[str, float]:
    """Runs on every rank."""
    from _support.hf.all_double import AllDouble

    with AllDouble():
        # transformers' gpt-oss doesn't tell its masks of documents.
        batch = batches(13) if name == "gpt_oss" else batches(16, documents=(3, 7, 6))
        return parity(lambda: hf_model(name), batch, sizes, **options).grads


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param("ring", MESHES[0]),
        *(pytest.param(kind, MESHES[2], marks=pytest.mark.slow) for kind in KINDS),
        pytest.param("ring", MESHES[1], marks=pytest.mark.slow),
        pytest.param("gather", MESHES[3], marks=pytest.mark.slow),
        pytest.param("ulysses", MESHES[4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_readme_model(gloo_pool, kind, sizes) -> None:
    size = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    for grads in gloo_pool.run(train, kind, sizes, {}, world_size=size):
        assert 0 <= grads["float64"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", MESHES[2]), ("gemma2", MESHES[0]), ("gpt_oss", MESHES[1])],
    ids=str,
)
def test_transformers_models(gloo_pool, name, sizes) -> None:
    pytest.importorskip("transformers")
    size = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    for grads in gloo_pool.run(train_hf, name, sizes, {}, world_size=size):
        assert 0 <= grads["float64"] < 1e-12


@pytest.mark.slow
def test_torchs_engine(gloo_pool) -> None:
    options = {"engine": "torch", "activation_checkpointing": True}
    for grads in gloo_pool.run(train, "gather", MESHES[1], options, world_size=4):
        assert 0 <= grads["float64"] < 1e-12


@pytest.mark.slow
def test_recomputed_blocks(gloo_pool) -> None:
    options = {"activation_checkpointing": True}
    for grads in gloo_pool.run(train, "ring", MESHES[1], options, world_size=4):
        assert 0 <= grads["float64"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(gloo_pool, backend) -> None:
    """Attention stays outside the graphs."""
    pytest.importorskip("transformers")
    options = {"compile": backend, "context_parallel": "gather"}
    for grads in gloo_pool.run(train_hf, "llama", MESHES[0], options, world_size=2):
        assert 0 <= grads["float64"] < 1e-12
    for grads in gloo_pool.run(train, "gather", MESHES[0], {"compile": backend}, world_size=2):
        assert 0 <= grads["float64"] < 1e-12


def generate() -> tuple[list[int], list[int], float]:
    """Runs on every rank: tokens of the plain and the parallel model, after a training step of the latter."""
    import copy

    import torch

    import parallel3d as p3d

    torch.manual_seed(0)
    plain = hf_model("llama")
    mesh = p3d.build_mesh(p3d.MeshLayout(cp=2), device_type="cpu")
    parallel = p3d.parallelize(copy.deepcopy(plain), mesh)
    hf_loss(parallel, **p3d.cp.shard_batch(batches(12)(0), mesh)).backward()
    parallel.zero_grad()
    prompt = batches(6)(1)["input_ids"]
    found = [
        model.eval().generate(prompt, max_new_tokens=5, do_sample=False)
        for model in (plain, parallel)
    ]
    with torch.no_grad():
        loss = hf_loss(parallel, **batches(12)(0)) - hf_loss(plain, **batches(12)(0))
    return found[0].flatten().tolist(), found[1].flatten().tolist(), float(loss.abs())


@pytest.mark.slow
def test_generate_and_evaluate(gloo_pool) -> None:
    """Whole sequences, on every rank."""
    pytest.importorskip("transformers")
    for plain, parallel, difference in gloo_pool.run(generate, world_size=2):
        assert plain == parallel
        assert difference < 1e-6
