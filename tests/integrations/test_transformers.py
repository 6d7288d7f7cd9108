"""transformers' Trainer for models of ``parallelize``: what docs/integrations.md has no row for."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")
import torch
from _support.integrations.hf import (
    LENGTH,
    VOCAB,
    Sizes,
    accelerate_state,
    arguments,
    loss_in_float64,
    parallel_model,
    recording,
    tiny_model,
    tiny_rows,
    tiny_tokenizer,
)
from _support.integrations.peft_rows import adapted, double, nf4, trained
from _support.integrations.rows import whole, whole_weights
from torch import distributed as dist
from torch.utils.data import IterableDataset

import parallel3d as p3d
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow


def make(sizes: Sizes | None, folder: Any, *, model: Any = None, **changes: Any) -> Any:
    """A Trainer on a mesh, or transformers' own without one, inside ``accelerate_state``."""
    import transformers

    from parallel3d.integrations.transformers import Trainer

    options = changes.pop("options", {})
    policy = changes.pop("mp_policy", None)
    model = tiny_model() if model is None else model
    data, trainer = 1, transformers.Trainer
    if sizes is not None:
        more = {} if policy is None else {"mp_policy": policy}
        (model, data), trainer = parallel_model(sizes, model, **more), Trainer
    elif (state := transformers.TrainingArguments(**arguments(folder))).world_size > 1:
        data = state.world_size
    options = {"train_dataset": tiny_rows(80), "compute_loss_func": loss_in_float64, **options}
    given = transformers.TrainingArguments(**arguments(folder, data, **changes))
    return recording(trainer)(model, given, **options)


def plain_and_parallel(sizes: Sizes, run: Callable[[Sizes | None], Any]) -> list[Any]:
    """What ``run`` returns in a plain process, and on the mesh."""
    found = []
    for mesh in (None, sizes):
        with accelerate_state(alone=mesh is None):
            found.append(run(mesh))
    return found


def lora_model(*, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The tiny model with peft's LoRA, of which fields of the config may be given."""
    return adapted(model=tiny_model(dtype=dtype), **changes).to(dtype)


def logged(trainer: Any) -> list[dict[str, float]]:
    """What it has logged, without times."""
    return [
        {
            name: value
            for name, value in logs.items()
            if not name.endswith(("runtime", "per_second"))
        }
        for logs in trainer.state.log_history
    ]


def assert_logs(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-6)


# What is logged, and predictions


def logs_are_those_of_one_process(sizes: Sizes, folder: Path) -> None:
    def run(sizes: Sizes | None) -> Any:
        metrics = {"compute_metrics": lambda p: {"rows": len(p.label_ids)}}
        options = {"eval_dataset": tiny_rows(12, seed=5), **metrics}
        evaluation = {"eval_strategy": "steps", "eval_steps": 5, "options": options}
        trainer = make(sizes, folder, include_num_input_tokens_seen="all", **evaluation)
        trainer.train()
        return trainer, trainer.predict(tiny_rows(10, seed=6))

    (plain, want), (trainer, predictions) = plain_and_parallel(sizes, run)
    assert_logs(logged(trainer), logged(plain))
    assert predictions.predictions.shape == (10, LENGTH, VOCAB)
    torch.testing.assert_close(
        torch.from_numpy(predictions.predictions), torch.from_numpy(want.predictions)
    )
    assert (predictions.label_ids == want.label_ids).all()


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), (1, 1, 2)])
def test_logs_are_those_of_one_process(gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes) -> None:
    """Losses, gradient norms, tokens, FLOPs, evaluation; predictions for rows that don't divide."""
    given = sizes, tmp_path
    gloo_pool.run(logs_are_those_of_one_process, *given, world_size=prod(sizes), timeout=300)


def mean_losses(sizes: Sizes, folder: Path) -> None:
    """BERT's classifier takes num_items_in_batch, and computes the mean over its rank's rows."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rows = [
        {"input_ids": row["input_ids"], "labels": int(row["input_ids"][0]) % 3}
        for row in tiny_rows(80)
    ]

    def run(sizes: Sizes | None) -> Any:
        torch.manual_seed(7)
        model = BertForSequenceClassification(config).to(torch.float64)
        options = {"train_dataset": rows, "eval_dataset": rows[:8], "compute_loss_func": None}
        trainer = make(sizes, folder, model=model, max_grad_norm=0, options=options)
        trainer.train()
        return trainer, trainer.evaluate()["eval_loss"]

    (plain, want), (trainer, got) = plain_and_parallel(sizes, run)
    assert trainer.losses == pytest.approx(plain.losses, rel=1e-9), (trainer.losses, plain.losses)
    assert got == pytest.approx(want, rel=1e-9)
    for name, weight in whole_weights(plain.model).items():
        torch.testing.assert_close(
            whole_weights(trainer.model)[name], weight, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2)])
def test_losses_that_are_means(gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes) -> None:
    gloo_pool.run(mean_losses, sizes, tmp_path, world_size=prod(sizes), timeout=300)


def evaluation(sizes: Sizes | None, folder: Path) -> dict[str, float]:
    with accelerate_state():
        trainer = make(sizes, folder, options={"eval_dataset": tiny_rows(10, seed=5)})
        return {k: v for k, v in trainer.evaluate().items() if k == "eval_loss"}


def test_a_last_batch_that_is_not_full(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """It counts as on as many processes without tp: transformers fills it up, and weighs by rank."""
    plain = gloo_pool.run(evaluation, None, tmp_path, world_size=2, timeout=300)[0]
    for got in gloo_pool.run(evaluation, (1, 2, 2), tmp_path, world_size=4, timeout=300):
        assert got == pytest.approx(plain, rel=1e-12)


def smoothed(sizes: Sizes, folder: Path, make_model: Any) -> None:
    def run(mesh: Sizes | None) -> list[float]:
        own = {"label_smoothing_factor": 0.2, "options": {"compute_loss_func": None}}
        trainer = make(mesh, folder, model=make_model(dtype=torch.float32), **own)
        trainer.train()
        return trainer.losses

    plain, losses = plain_and_parallel(sizes, run)
    assert plain == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("make_model", [tiny_model, lora_model])
def test_label_smoothing_shifts_labels(
    gloo_pool: GlooPool, tmp_path: Path, make_model: Any
) -> None:
    """transformers asks for the name of the model's class, which fully_shard changes."""
    gloo_pool.run(smoothed, (1, 2, 2), tmp_path, make_model, world_size=4, timeout=300)


# Data


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(tiny_rows(80))


def data(folder: Path) -> None:
    with accelerate_state(alone=True):
        plain = make(None, folder, options={"train_dataset": Stream()})
        plain.train()
    with accelerate_state():
        streamed = make((1, 2, 2), folder, options={"train_dataset": Stream()})
        streamed.train()
        assert streamed.losses == pytest.approx(plain.losses, rel=1e-9)
        loader = make((1, 2, 2), folder, dataloader_num_workers=1).get_train_dataloader()
        torch.manual_seed(5)
        loader.base_dataloader.worker_init_fn(0)  # as a worker process calls it
        drawn: list[Any] = [None] * 4
        dist.all_gather_object(drawn, torch.rand(()).item())
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_ranks_of_a_tp_group_read_the_same(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Of a stream, and of a dataset that draws in its worker processes."""
    gloo_pool.run(data, tmp_path, world_size=4, timeout=300)


# Files


def dropout_model() -> Any:
    return tiny_model(attention_dropout=0.1, hidden_dropout=0.1)


def lora_dropout_model() -> Any:
    return adapted(model=dropout_model(), lora_dropout=0.1).double()


ADAMW = {"optim": "adamw_torch", "learning_rate": 0.01}


def saving(sizes: Sizes, folder: Path, make_model: Any, limit: int | None = None) -> list[float]:
    """Trains, saving after every 3 steps; returns the losses."""
    with accelerate_state():
        saves = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": limit, **ADAMW}
        trainer = make(sizes, folder, model=make_model(), **saves)
        trainer.train()
        torch.save(whole_weights(trainer.model), folder / f"weights-{dist.get_rank()}")
        return trainer.losses


def resuming(
    sizes: Sizes, folder: Path, at: str, want: list[float], make_model: Any, exact: bool
) -> None:
    with accelerate_state():
        trainer = make(sizes, folder, model=make_model(), **ADAMW)
        torch.rand(3)
        trainer.train(resume_from_checkpoint=str(folder / at))
        weights = torch.load(folder / f"weights-{dist.get_rank() % 2}")
    step = int(at.rpartition("-")[2])
    assert len(trainer.losses) == 10 - step
    if exact:
        assert trainer.losses == want[step:]
        for name, value in whole_weights(trainer.model).items():
            assert torch.equal(value, weights[name]), name
    else:
        assert trainer.losses == pytest.approx(want[step:], rel=1e-9)


@pytest.mark.parametrize("make_model", [dropout_model, lora_dropout_model])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)])
def test_resuming_is_exact(
    gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes, make_model: Any
) -> None:
    """With dropout, in the middle of an epoch, from the last and from an earlier checkpoint."""
    want = gloo_pool.run(saving, sizes, tmp_path, make_model, world_size=2, timeout=300)[0]
    for at in ("checkpoint-3", "checkpoint-6"):
        given = (sizes, tmp_path, at, want, make_model, True)
        gloo_pool.run(resuming, *given, world_size=2, timeout=300)


@pytest.mark.parametrize("make_model", [tiny_model, lora_model])
def test_resuming_on_another_mesh(gloo_pool: GlooPool, tmp_path: Path, make_model: Any) -> None:
    want = gloo_pool.run(saving, (1, 2, 1), tmp_path, make_model, 2, world_size=2, timeout=300)[0]
    assert {f.name for f in tmp_path.glob("checkpoint-*")} == {"checkpoint-9", "checkpoint-10"}
    at = "checkpoint-9"
    for sizes in ((1, 2, 2), (2, 1, 1), (1, 1, 1)):
        arguments = (sizes, tmp_path, at, want, make_model, False)
        gloo_pool.run(resuming, *arguments, world_size=prod(sizes), timeout=300)


def refused_to_resume(folder: Path) -> None:
    with accelerate_state():
        trainer = make((1, 2, 1), folder, per_device_train_batch_size=1, optim="adamw_torch")
        with pytest.raises(p3d.CheckpointError, match="has 8 rows, and here 4"):
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-9"))
        foreign = folder / "foreign"
        foreign.mkdir(exist_ok=True)
        (foreign / "optimizer.pt").touch()
        for model, call in ((tiny_model(), "load_hf"), (lora_model(), "load_peft")):
            trainer = make((1, 2, 1), folder, model=model)
            with pytest.raises(
                p3d.CheckpointError, match=f"of a Trainer without parallel3d.*{call} "
            ):
                trainer.train(resume_from_checkpoint=str(foreign))


def test_what_can_not_be_resumed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(saving, (1, 2, 1), tmp_path, tiny_model, world_size=2, timeout=300)
    gloo_pool.run(refused_to_resume, tmp_path, world_size=2, timeout=300)


EACH_FIFTH = {
    "save_strategy": "steps",
    "save_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


def with_evaluation() -> dict[str, Any]:
    return {"processing_class": tiny_tokenizer(), "eval_dataset": tiny_rows(8, seed=5)}


def saved(sizes: Sizes, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with accelerate_state():
        trainer = make(
            sizes,
            folder,
            model=tiny_model(tied=True, dtype=torch.float32),
            options=with_evaluation(),
            save_only_model=True,
            load_best_model_at_end=True,
            **EACH_FIFTH,
        )
        trainer.train()
        evaluated = {
            log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
        }
        best = max(evaluated, key=lambda step: evaluated[step])
        assert trainer.state.best_global_step == best
        weights = whole_weights(trainer.model)
        for _ in range(2):  # also into a folder that has something
            trainer.save_model()
        for place in (folder, folder / f"checkpoint-{best}"):
            model = AutoModelForCausalLM.from_pretrained(place)
            assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
            assert AutoTokenizer.from_pretrained(place).pad_token == "<pad>"
        assert not list(folder.glob(".parallel3d*"))
        again = make(sizes, folder, model=tiny_model(tied=True, dtype=torch.float32))
        again.args.max_steps = 10
        again.train(resume_from_checkpoint=str(folder / "checkpoint-10"))  # weights alone
        assert again.losses == []


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2)])
def test_saved_models_are_those_of_from_pretrained(
    gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes
) -> None:
    gloo_pool.run(saved, sizes, tmp_path, world_size=sizes[1] * sizes[2], timeout=300)


# Models of peft

THEIRS = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
"""Of a plain Trainer's checkpoint: what is in ``parallel3d/`` here."""


def two_adapters(active: str) -> Any:
    from peft import LoraConfig

    model = lora_model()
    torch.manual_seed(3)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model.set_adapter(active)
    return model.double()


def adapters_saved(sizes: Sizes, folder: Path, active: str) -> None:
    from peft import PeftModel

    def run(mesh: Sizes | None, place: Path) -> Any:
        trainer = make(
            mesh,
            place,
            model=lora_model() if active == "default" else two_adapters(active),
            options=with_evaluation(),
            # transformers' own loads the default adapter's file into the active one.
            load_best_model_at_end=mesh is not None,
            **EACH_FIFTH,
        )
        trainer.train()
        trainer.save_model()
        return trainer

    def loaded(place: Path) -> dict[str, Any]:
        place = place if active == "default" else place / active
        model = PeftModel.from_pretrained(tiny_model(), place, active)
        named = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
        assert named
        return named

    theirs = folder / f"plain-{dist.get_rank()}"
    with accelerate_state(alone=True):
        plain = run(None, theirs)
    with accelerate_state():
        trainer = run(sizes, folder / "ours")
        trainer.save_model()  # also into a folder that has something
    assert trainer.losses == pytest.approx(plain.losses, rel=1e-9)
    best = trainer.state.best_global_step
    assert best == plain.state.best_global_step < 10
    at = f"checkpoint-{best}"
    weights = whole_weights(trainer.model)
    for name, want in loaded(theirs / at).items():
        torch.testing.assert_close(weights[name], want, rtol=1e-9, atol=1e-9, msg=name)

    def files(place: Path) -> set[str]:
        found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        return {name for name in found if not name.startswith(("checkpoint-", "parallel3d"))}

    assert files(folder / "ours") == files(theirs)
    assert files(folder / "ours" / at) == files(theirs / at) - THEIRS
    for place in (folder / "ours", folder / "ours" / at):
        assert all(torch.equal(p, weights[name]) for name, p in loaded(place).items())
    # The checkpoint has what was trained, and not the base.
    stored = list((folder / "ours" / at / "parallel3d").rglob("*.safetensors"))
    assert any(f"lora_A.{active}".encode() in path.read_bytes() for path in stored)
    assert not any(b"base_layer" in path.read_bytes() for path in stored)


@pytest.mark.parametrize(
    ("sizes", "active"), [((1, 2, 1), "default"), ((1, 1, 2), "default"), ((1, 2, 2), "other")]
)
def test_adapters_are_saved_as_by_a_plain_trainer(
    gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes, active: str
) -> None:
    """The best ones, by a Trainer whose losses are those of plain peft; with "other" there are two."""
    ranks = sizes[1] * sizes[2]
    gloo_pool.run(adapters_saved, sizes, tmp_path, active, world_size=ranks, timeout=300)


def quantised(folder: Path) -> None:
    from peft import PeftModel

    # nf4's vocabulary
    rows = [{k: v.clamp(max=42) for k, v in row.items()} for row in tiny_rows(80)]

    def run(sizes: Sizes | None, **changes: Any) -> Any:
        trainer = make(sizes, folder, model=nf4(), options={"train_dataset": rows}, **changes)
        with double("llama"):
            trainer.train()
        return trainer

    with accelerate_state(alone=True):
        plain = run(None)
    with accelerate_state():
        trainer = run((1, 2, 1), save_strategy="steps", save_steps=6)
        assert trainer.losses == pytest.approx(plain.losses, rel=1e-9)
        trainer.save_model()
        weights = trained(trainer.model)
        loaded = PeftModel.from_pretrained(nf4().unload(), folder, is_trainable=True)
        assert trained(loaded).keys() == weights.keys()
        for name, param in trained(loaded).items():
            assert torch.equal(param.detach(), whole(weights[name])), name
        again = make((1, 2, 1), folder, model=nf4(), options={"train_dataset": rows})
        with double("llama"):
            again.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
        assert again.losses == trainer.losses[6:]


def test_qlora_is_saved_and_resumed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(quantised, tmp_path, world_size=2, timeout=300)


# Precision


def bf16(sizes: Sizes, folder: Path) -> None:
    runs, on = {}, {"bf16": True}
    policy = {"mp_policy": p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for name, mesh, changes in (
        ("plain", None, on),
        ("autocast", sizes, on),
        ("policy", sizes, on | policy),
        ("float32", sizes, {}),
    ):
        with accelerate_state(alone=mesh is None):
            trainer = make(mesh, folder, model=tiny_model(dtype=torch.float32), **changes)
            seen = []
            head = trainer.model.lm_head
            head.register_forward_hook(lambda *call, seen=seen: seen.append(call[2].dtype))
            trainer.train()
            assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
            assert set(seen) == {torch.float32 if name == "float32" else torch.bfloat16}, name
            runs[name] = torch.tensor(trainer.losses)
    assert (runs["autocast"] - runs["plain"]).abs().max() < 0.02
    assert (runs["policy"] - runs["float32"]).abs().max() < 0.05
    assert (runs["autocast"] - runs["float32"]).abs().max() > 0


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)])
def test_bf16_is_autocast_or_the_policys(gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes) -> None:
    gloo_pool.run(bf16, sizes, tmp_path, world_size=2, timeout=300)


# Errors


def refused(folder: Path) -> None:
    import transformers
    from accelerate.utils import ParallelismConfig
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    def raises(text: str, **changes: Any) -> None:
        with accelerate_state(), pytest.raises(p3d.Parallel3dError, match=text):
            make((1, 1, 2), folder, **changes)

    raises("fp16=True with a parallel model: there is no loss scaling", fp16=True)
    raises("torch_compile=True .* use parallelize", torch_compile=True)
    raises("fsdp=True .* leave fsdp out", fsdp=True)
    raises("knows 1 of 2 processes; .* use_cpu=True", use_cpu=False)
    raises("leave parallelism_config out", parallelism_config=ParallelismConfig())
    raises("use_liger_kernel", use_liger_kernel=True)
    raises("auto_find_batch_size", auto_find_batch_size=True)
    raises("bf16_full_eval", bf16_full_eval=True)
    raises("eval_use_gather_object", eval_use_gather_object=True)
    raises("save_on_each_node", save_on_each_node=True)
    raises("batch_rebalance", train_sampling_strategy="batch_rebalance")
    raises("dispatch_batches=True", accelerator_config={"dispatch_batches": True})
    policy = p3d.MixedPrecisionPolicy(param_dtype=torch.float16)
    raises("computes in torch.float16", bf16=True, mp_policy=policy)
    with accelerate_state():
        from parallel3d.integrations.transformers import Trainer

        given = transformers.TrainingArguments(**arguments(folder))
        with pytest.raises(p3d.Parallel3dError, match="is not parallel; call"):
            Trainer(tiny_model(), given)
        with pytest.raises(p3d.Parallel3dError, match="instead of model_init"):
            Trainer(args=given, model_init=tiny_model)
        by_cp = p3d.build_mesh(p3d.MeshLayout(cp=2), device_type="cpu")
        with pytest.raises(
            p3d.MeshError, match="has an axis cp: Trainer would give its ranks other"
        ):
            Trainer(p3d.fully_shard(tiny_model(), mesh=by_cp), given)
        model, _ = parallel_model((1, 2, 1), tiny_model())
        lora = get_peft_model(model, LoraConfig(target_modules=["down_proj"]))
        with pytest.raises(p3d.Parallel3dError, match="add adapters and heads before"):
            Trainer(lora, given)

        # Adapters that save_peft makes no folder of.
        config = LoraConfig(target_modules=["down_proj"])
        prompts = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        own = tiny_model()
        own.add_adapter(config)
        for lora, text in (
            (get_peft_model(tiny_model(), prompts).double(), "'default', of peft's PROMPT_TUNING"),
            (get_peft_model(tiny_model(), config, mixed=True), "use get_peft_model without mixed"),
            (own, "use peft's get_peft_model"),
        ):
            lora, _ = parallel_model((1, 2, 1), lora)
            saves = transformers.TrainingArguments(**arguments(folder, save_strategy="steps"))
            with pytest.raises(p3d.Parallel3dError, match=f"can't save adapters: .*{text}"):
                Trainer(lora, saves)
            with pytest.raises(p3d.Parallel3dError, match="save what was trained"):
                Trainer(lora, given).save_model()


def test_arguments_that_would_be_wrong_are_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(refused, tmp_path, world_size=2, timeout=300)
