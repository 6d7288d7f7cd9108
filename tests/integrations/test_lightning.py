"""parallel3d.integrations.lightning: a Trainer on our mesh does what one on a single process does."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
import torch
from _support.integrations.rows import apart, whole_weights

import parallel3d as p3d
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow  # importing Lightning alone takes seconds


@contextlib.contextmanager
def programs() -> Iterator[tuple[Any, Any, Path]]:
    """Imported on the ranks, not where the tests are collected: the programs, the integration, a folder."""
    from _support.integrations import lightning_programs

    with lightning_programs.as_torchrun() as folder:
        yield lightning_programs, p3d.integrations.lightning, folder
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _options(sizes: tuple[int, int, int], options: dict[str, Any]) -> None:
    with programs() as (lib, ours, _):
        layout = p3d.MeshLayout(*sizes)
        # Momentum would hide a wrong factor of all gradients less than AdamW, which does not see it at all.
        plain = lib.plain(**options)
        module, strategy = lib.Module(), ours.Strategy(layout, tp_plan="auto")
        lib.trainer(strategy, **options).fit(module, lib.loader(layout))
        assert apart(whole_weights(module), whole_weights(plain)) < 1e-12
        changed = lib.plain()  # the options change something
        assert apart(whole_weights(changed), whole_weights(plain)) > 1e-3


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 5},  # 12 batches: the last step has two of them
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ],
    ids=["norm", "value", "accumulation", "both"],
)
def test_options_of_the_trainer(
    gloo_pool: GlooPool, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    gloo_pool.run(_options, sizes, options, world_size=4, timeout=200)


def _resume(first: tuple[int, int, int], then: tuple[int, int, int]) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with programs() as (lib, ours, folder):
        layout = p3d.MeshLayout(*first)
        whole = lib.Module(optimizer=adamw)
        options = {"max_epochs": 2}
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)
        trainer = lib.trainer(
            ours.Strategy(layout, tp_plan="auto"),
            enable_checkpointing=True,
            callbacks=[saver],
            **options,
        )
        trainer.fit(whole, lib.loader(layout))
        assert trainer.global_step == 24
        saved = sorted(path.name for path in folder.iterdir())
        assert saved == ["step=12.ckpt", "step=18.ckpt", "step=24.ckpt", "step=6.ckpt"], saved

        layout = p3d.MeshLayout(*then)
        resumed = lib.Module(optimizer=adamw)
        with torch.no_grad():
            for parameter in resumed.parameters():
                parameter.zero_()
        trainer = lib.trainer(ours.Strategy(layout, tp_plan="auto"), **options)
        trainer.fit(resumed, lib.loader(layout), ckpt_path=folder / "step=12.ckpt")
        assert trainer.global_step == 24
        assert len(resumed.losses) == 12
        difference = max(abs(a - b) for a, b in zip(resumed.losses, whole.losses[12:], strict=True))
        weights = apart(whole_weights(resumed), whole_weights(whole))
        limit = 0.0 if first == then else 1e-9
        assert difference <= limit, difference
        assert weights <= limit, weights
        # A plain module reads the same checkpoint, and so does one that only validates.
        alone = lib.Module()
        p3d.checkpoint.load(folder / "step=24.ckpt", alone)
        assert apart(whole_weights(alone), whole_weights(whole)) == 0
        other = lib.Module()
        lib.trainer(ours.Strategy(layout, tp_plan="auto")).validate(
            other, lib.loader(layout), ckpt_path=folder / "step=24.ckpt", verbose=False
        )
        assert apart(whole_weights(other), whole_weights(whole)) == 0


@pytest.mark.parametrize("then", [(1, 2, 2), (2, 2, 1)], ids=["same mesh", "another mesh"])
def test_resume(gloo_pool: GlooPool, then: tuple[int, int, int]) -> None:
    gloo_pool.run(_resume, (1, 2, 2), then, world_size=4, timeout=200)


def _evaluate() -> None:
    with programs() as (lib, ours, _):
        layout = p3d.MeshLayout(shard=2, tp=2)
        plain = lib.Module()
        alone = lib.trainer()
        alone.fit(plain, lib.loader(), lib.loader(batches=3, first=500))
        module = lib.Module()
        trainer = lib.trainer(ours.Strategy(layout, tp_plan="auto"))
        trainer.fit(module, lib.loader(layout), lib.loader(layout, 3, first=500))
        for name, value in alone.callback_metrics.items():
            if name == "counted":  # torchmetrics sums over all processes there are
                continue
            assert trainer.callback_metrics[name].item() == pytest.approx(
                value.item(), rel=1e-12
            ), name
        assert trainer.callback_metrics["samples"] == 24  # those of a tp group count once
        assert trainer.callback_metrics["counted"] == 24
        trainer.test(module, lib.loader(layout, 3, first=700), verbose=False)
        alone.test(plain, lib.loader(batches=3, first=700), verbose=False)
        assert trainer.callback_metrics["test"].item() == pytest.approx(
            alone.callback_metrics["test"].item(), rel=1e-12
        )
        outputs = torch.cat(trainer.predict(module, lib.loader(layout, 2, first=900)))
        with torch.no_grad():
            wanted = plain.model(torch.cat([lib.tokens(900 + i, batch=1) for i in range(16)]))
        rank = layout.data_rank(torch.distributed.get_rank())
        torch.testing.assert_close(outputs, wanted[rank::2], rtol=0, atol=1e-12)
        assert trainer.strategy.all_gather(torch.ones(3)).shape == (2, 3)
        with pytest.raises(p3d.Parallel3dError, match="1 to 2 batches"):
            trainer.predict(
                module, torch.utils.data.DataLoader([lib.tokens(0)[0]] * 3, batch_size=1)
            )


def test_evaluation_counts_a_tp_group_once(gloo_pool: GlooPool) -> None:
    gloo_pool.run(_evaluate, world_size=4, timeout=200)


def _whole_module_and_meta() -> None:
    with programs() as (lib, ours, _):
        layout = p3d.MeshLayout(replicate=2, shard=2)

        class Two(lib.Module):
            """Several parts, and a parameter of the LightningModule itself."""

            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
                self.second = torch.nn.Linear(lib.VOCAB, lib.VOCAB).double()

            def training_step(self, batch: Any, index: int) -> Any:
                logits = self.second(self.model(batch)) * self.scale
                self.losses.append(float(logits.detach().sum()))
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

        plain, module = lib.plain(made=Two()), Two()
        with pytest.raises(p3d.Parallel3dError, match=r"2 children with parameters: model, second"):
            lib.trainer(ours.Strategy(layout)).fit(module, lib.loader(layout))
        with pytest.raises(
            p3d.Parallel3dError, match="3 trained parameters, first scale, are outside"
        ):
            lib.trainer(ours.Strategy(layout, module="model")).fit(module, lib.loader(layout))
        with pytest.raises(
            p3d.Parallel3dError, match="no such module; those with parameters are model"
        ):
            lib.trainer(ours.Strategy(layout, module="modle")).fit(module, lib.loader(layout))
        lib.trainer(ours.Strategy(layout, module="")).fit(module, lib.loader(layout))
        assert isinstance(module, p3d.fsdp.FSDPModule)
        assert apart(whole_weights(module), whole_weights(plain)) < 1e-12

        class OnMeta(lib.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = None

            def configure_model(self) -> None:
                if self.model is None:
                    with torch.device("meta"):
                        self.model = lib.Lm().double()

        weights = []
        for sizes in ((2, 2, 1), (1, 2, 2)):
            made = OnMeta()
            made.losses = []
            strategy = ours.Strategy(p3d.MeshLayout(*sizes), tp_plan="auto", seed=3)
            lib.trainer(strategy).fit(made, lib.loader(strategy.layout))
            weights.append(whole_weights(made))
        assert apart(*weights) < 1e-12

        class ByHand(lib.Module):
            def configure_model(self) -> None:
                p3d.parallelize(self.model, self.device_mesh)

        made = ByHand()
        lib.trainer(ours.Strategy(layout)).fit(made, lib.loader(layout))
        assert apart(whole_weights(made), whole_weights(lib.plain())) < 1e-12


def test_what_is_parallelized(gloo_pool: GlooPool) -> None:
    gloo_pool.run(_whole_module_and_meta, world_size=4, timeout=200)


def _precision() -> None:
    from lightning.pytorch.plugins import AsyncCheckpointIO, Precision

    with programs() as (lib, ours, folder):
        layout = p3d.MeshLayout(shard=2)
        plain = lib.plain(made=lib.Module(torch.float32))
        for precision, dtype in (
            ("32-true", torch.float32),
            ("bf16-mixed", torch.float32),
            ("bf16-true", torch.bfloat16),
        ):
            module = lib.Module(torch.float32)
            trainer = lib.trainer(ours.Strategy(layout), precision=precision)
            trainer.fit(module, lib.loader(layout))
            assert {p.dtype for p in module.parameters()} == {dtype}
            assert trainer.precision == precision
            far = max(abs(a - b) for a, b in zip(module.losses, plain.losses, strict=True))
            if precision == "32-true":
                assert far < 1e-5
            else:
                assert 1e-4 < far < 0.05, (precision, far)  # it did compute in bfloat16
        with pytest.raises(p3d.MeshError, match="cp=2: the Strategy cuts no sequences"):
            ours.Strategy(p3d.MeshLayout(cp=2))
        for refused in ("16-mixed", "64-true"):  # by Lightning
            with pytest.raises(ValueError, match=f"{refused}.*Choose a different precision"):
                lib.trainer(ours.Strategy(layout), precision=refused)
        with pytest.raises(p3d.Parallel3dError, match=r"Mine.*, which this strategy does not know"):
            lib.trainer(ours.Strategy(layout), plugins=[type("Mine", (Precision,), {})()])
        with pytest.raises(p3d.Parallel3dError, match="give one of them"):
            policy = p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            lib.trainer(ours.Strategy(layout, mp_policy=policy), precision="bf16-mixed")
        with pytest.raises(p3d.CheckpointError, match="AsyncCheckpointIO"):
            lib.trainer(ours.Strategy(layout), plugins=[AsyncCheckpointIO()])
        with pytest.raises(p3d.MeshError, match="Nearest that fit"):
            lib.trainer(ours.Strategy(p3d.MeshLayout(shard=3)))
        with pytest.raises(p3d.WrongTypeError, match="did you mean loss_parallel"):
            ours.Strategy(layout, loss_paralel=True)
        with pytest.raises(p3d.Parallel3dError, match="it must be a MeshLayout"):
            ours.Strategy((1, 2, 1))
        from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

        for averaging in (StochasticWeightAveraging(0.1), EMAWeightAveraging()):
            trainer = lib.trainer(ours.Strategy(layout), callbacks=[averaging])
            with pytest.raises(p3d.Parallel3dError, match=r"callback.*optim.EMA"):
                trainer.fit(lib.Module(), lib.loader(layout, 2))
        # Checkpoints that are refused leave the module as it was.
        trainer = lib.trainer(ours.Strategy(layout))
        module = lib.Module()
        trainer.fit(module, lib.loader(layout, 2))
        with pytest.raises(p3d.CheckpointError, match="storage_options"):
            trainer.save_checkpoint(folder / "a.ckpt", storage_options={})
        with pytest.raises(p3d.CheckpointError, match=r"memory:.*; it must be a folder"):
            trainer.save_checkpoint("memory://a.ckpt")
        module.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].update(a=1)
        with pytest.raises(p3d.CheckpointError, match="a hook put values"):
            trainer.save_checkpoint(folder / "a.ckpt")
        module.on_save_checkpoint = lambda checkpoint: checkpoint.update(mine=[1, 2])
        trainer.save_checkpoint(folder / "a.ckpt", weights_only=True)
        with pytest.raises(p3d.CheckpointError, match="without an optimizer"):
            again = lib.trainer(ours.Strategy(layout))
            again.fit(lib.Module(), lib.loader(layout, 2), ckpt_path=folder / "a.ckpt")
        seen: list[Any] = []
        other = lib.Module()
        other.on_load_checkpoint = lambda checkpoint: seen.append(checkpoint["mine"])
        lib.trainer(ours.Strategy(layout)).validate(
            other, lib.loader(layout, 2), ckpt_path=folder / "a.ckpt", verbose=False
        )
        assert seen == [[1, 2]]
        assert apart(whole_weights(other), whole_weights(module)) == 0


def test_precision_and_refusals(gloo_pool: GlooPool) -> None:
    gloo_pool.run(_precision, world_size=2, timeout=200)
