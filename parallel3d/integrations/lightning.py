"""Lightning: a Strategy that makes a Trainer train on a (replicate, shard, tp) mesh."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from parallel3d import checkpoint as checkpoints
from parallel3d.errors import CheckpointError, MeshError, Parallel3dError, WrongTypeError
from parallel3d.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from parallel3d.fsdp.inspect import unit_of
from parallel3d.materialize import materialize
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.mesh.axes import DATA_AXES
from parallel3d.optim import clip_grad_norm_
from parallel3d.optim.accumulate import group_of
from parallel3d.parallelize import parallelize
from parallel3d.tp.resolve import Plan

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins import (
        HalfPrecision,
        MixedPrecision,
        Precision,
        TorchCheckpointIO,
    )
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(
        f"parallel3d.integrations.lightning needs Lightning ({error}): pip install 'lightning>=2.6,<2.7'"
    ) from error

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OPTIONS = [n for n in inspect.signature(parallelize).parameters if n not in ("model", "mesh")]


class Strategy(ModelParallelStrategy):
    """Trains a LightningModule with ``parallelize`` on the mesh of a ``MeshLayout``::

        strategy = Strategy(p3d.MeshLayout(shard=2, tp=2), tp_plan="auto")
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, gradient_clip_val=1.0)
        trainer.fit(module)

    After ``configure_model`` and before ``configure_optimizers`` it parallelizes the module's one child with
    parameters, and initializes it with ``materialize`` if it is on meta. ``configure_model`` may also call
    ``parallelize(..., self.device_mesh)`` itself. Samplers, metrics (``log(sync_dist=True)``, torchmetrics)
    and ``all_gather`` are over the data ranks: the ranks of one tp group count as one. Gradients are clipped
    by norm with ``optim.clip_grad_norm_``, and with ``accumulate_grad_batches`` the last batch alone is
    all-reduced over replicate. A checkpoint is a folder of ``checkpoint.save``, which a Trainer on any mesh
    resumes from; ``checkpoint.load`` reads it into a plain LightningModule.

    Args:
        layout: the sizes of the mesh; together they are devices times nodes. One may be -1.
        tp_plan: as for ``parallelize``; names are those within the child.
        module: the name of the child to parallelize; ``""`` is the LightningModule itself, whose steps are
            then forwards. By default the one child that has parameters.
        seed: the seed for ``materialize``.
        process_group_backend, timeout: backend and timeout of the process group that Lightning starts.
        options: the other arguments of ``parallelize``.

    Precision of the Trainer: ``"bf16-mixed"`` becomes ``mp_policy``: computing in bfloat16, reducing and
    outputs in float32. ``"32-true"``, ``"bf16-true"`` and ``"16-true"`` are the dtype of the parameters.

    Raises:
        Parallel3dError, MeshError: an argument is invalid. By the Trainer's constructor: the layout does not
            fit its devices, or its precision or checkpoint plugin can't be used.
    """

    def __init__(
        self,
        layout: MeshLayout,
        tp_plan: Plan | None = None,
        *,
        module: str | None = None,
        seed: int = 0,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **options: Any,
    ) -> None:
        if not isinstance(layout, MeshLayout):
            raise Parallel3dError(
                f"layout is {layout!r}; it must be a MeshLayout, such as MeshLayout(shard=2, tp=2)"
            )
        if layout.cp != 1:
            raise MeshError(
                f"cp={layout.cp}: the Strategy cuts no sequences, and metrics would be those of one part; "
                "use cp=1, or a loop of your own"
            )
        for name in options:
            if name not in _OPTIONS:
                near = get_close_matches(name, _OPTIONS, n=1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise WrongTypeError(
                    f"Strategy has no argument {name}{meant} It takes those of parallelize: "
                    f"{', '.join(_OPTIONS)}"
                )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.layout = layout
        self._module_name = module
        self._seed = seed
        self._options = {"tp_plan": tp_plan, **options}
        self._roots: list[FSDPModule] = []
        self._data_group: ProcessGroup | None = None

    # -- what the Trainer calls before there are processes -----------------------------------------------

    def _configure_launcher(self) -> None:
        # The last call of the Trainer's constructor: a mistake is found before processes are started.
        self.layout = self.layout.resolve(self.num_nodes * self.num_processes)
        if self._checkpoint_io is not None and type(self._checkpoint_io) is not TorchCheckpointIO:
            raise CheckpointError(
                f"the Trainer has the plugin {type(self._checkpoint_io).__name__}, but this strategy writes "
                "checkpoints itself, by parallel3d.checkpoint.save; leave the plugin out"
            )
        self._set_precision()
        super()._configure_launcher()

    def _set_precision(self) -> None:
        plugin = self.precision_plugin
        if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
            if self._options.get("mp_policy") is not None:
                raise Parallel3dError(
                    f"the Trainer has precision='bf16-mixed' and the strategy mp_policy="
                    f"{self._options['mp_policy']}; give one of them"
                )
            self._options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
            plugin = Precision()  # in place of autocast
            plugin.precision = "bf16-mixed"
        elif type(plugin) not in (Precision, HalfPrecision):
            raise Parallel3dError(
                f"precision is {plugin.precision!r} ({type(plugin).__name__}), which this strategy does not "
                "know; use '32-true', 'bf16-mixed', 'bf16-true' or '16-true', or mp_policy= of the strategy"
            )
        self.precision_plugin = plugin

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            clip_grad_norm_(list(plugin.main_params(optimizer)), clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    # -- processes and the model -------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self._setup_distributed()
        self._device_mesh = build_mesh(self.layout, device_type=self.root_device.type)
        self._data_group = group_of(self._device_mesh[tuple(DATA_AXES)], "Strategy")
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        assert self.lightning_module is not None
        fitting = trainer.state.fn == "fit"
        for callback in trainer.callbacks if fitting else ():  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise Parallel3dError(
                    f"the Trainer has the callback {type(callback).__name__}, whose copy of the "
                    "module is not parallel and can't average one that is; leave it out, and use "
                    "parallel3d.optim.EMA"
                )
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._parallelize(self.lightning_module)
        self.model_to_device()  # what is outside the parallel module
        for part in self.model.modules():
            if isinstance(part, Metric) and part.process_group is None:
                part.process_group = self._data_group
        self.barrier()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _parallelize(self, owner: LightningModule) -> None:
        modules = [owner, *owner.modules()]
        if not any(unit_of(module) is not None for module in modules):
            module = self._chosen(owner)
            parallelize(module, self.device_mesh, **self._options)
            if module is owner:
                for name in _STEPS:
                    register_fsdp_forward_method(owner, name)
        if any(tensor.is_meta for tensor in (*owner.parameters(), *owner.buffers())):
            materialize(owner, device=self.root_device, seed=self._seed)
        self._roots = [module for module in owner.modules() if isinstance(module, FSDPModule)]

    def _chosen(self, owner: LightningModule) -> nn.Module:
        """Returns the module to parallelize; raises Parallel3dError if parameters outside it are trained."""
        children = [
            name for name, child in owner.named_children() if any(True for _ in child.parameters())
        ]
        name = self._module_name
        if name is None:
            if len(children) != 1:
                raise Parallel3dError(
                    f"{type(owner).__name__} has {len(children)} children with parameters"
                    f"{': ' * bool(children)}{', '.join(children)}; which to parallelize? Give the strategy "
                    'module=, the name of one, or module="" for the whole LightningModule'
                )
            name = children[0]
        try:
            module = owner.get_submodule(name)
        except AttributeError:
            raise Parallel3dError(
                f"module is {name!r}, but {type(owner).__name__} has no such module; those with parameters "
                f"are {', '.join(children)}"
            ) from None
        inside = set(module.parameters())
        outside = [n for n, p in owner.named_parameters() if p.requires_grad and p not in inside]
        if outside:
            raise Parallel3dError(
                f"{len(outside)} trained parameters, first {outside[0]}, are outside {name!r}, which alone "
                'is parallelized: nobody would reduce their gradients. Give the strategy module="", for the '
                "whole LightningModule, or freeze them"
            )
        return module

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Defers the all-reduce over replicate; gradients are still reduce-scattered, to save memory."""
        for root in self._roots:
            root.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for root in self._roots:
                root.set_requires_all_reduce(True, recurse=False)

    # -- data and metrics --------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = self.layout
        return {"num_replicas": layout.data_size, "rank": layout.data_rank(self.global_rank)}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns ``dataloader``; raises Parallel3dError if the ranks have different numbers of batches."""
        try:
            number = len(dataloader)
        except (TypeError, NotImplementedError):  # as of an IterableDataset
            return dataloader
        numbers: list[int] = [0] * self.world_size
        dist.all_gather_object(numbers, number)
        if len(set(numbers)) > 1:
            raise Parallel3dError(
                f"the ranks' dataloaders have {min(numbers)} to {max(numbers)} batches (in order of the "
                f"ranks: {numbers}), and those with more would wait for the others; make the number of "
                f"samples a multiple of {self.layout.data_size} data ranks times the batch size, or drop_last"
            )
        return dataloader

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        return super().reduce(tensor, self._data_group if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        value = torch.tensor(int(decision), device=self.root_device)
        return bool(self.reduce(value, dist.group.WORLD, "min" if all else "max"))

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        return super().all_gather(tensor, self._data_group if group is None else group, sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # save_checkpoint writes the weights, and optimizers' states

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is not None:
            raise CheckpointError(
                f"storage_options is {storage_options!r}; checkpoints are folders of a file system only"
            )
        if checkpoint.pop("state_dict", None):
            raise CheckpointError(
                "a hook put values into checkpoint['state_dict'], but weights are written from the module; "
                "put the values into another entry of the checkpoint"
            )
        assert self.lightning_module is not None
        with_optimizers = checkpoint.pop("optimizer_states", None) is not None
        rest = io.BytesIO()
        torch.save(checkpoint, rest)
        checkpoints.save(
            self._folder(filepath),
            self.lightning_module,
            self.optimizers if with_optimizers else None,
            step=checkpoint["global_step"],
            extra={"lightning": torch.frombuffer(rest.getbuffer(), dtype=torch.uint8)},
            keep=1,
        )

    def _folder(self, path: str | os.PathLike[str]) -> Path:
        """Returns the first rank's ``path``, on every rank; raises CheckpointError for a URL."""
        path = self.broadcast(os.fspath(path))
        if "://" in path:
            raise CheckpointError(
                f"the checkpoint's path is {path!r}; it must be a folder on a file system of all ranks"
            )
        return Path(path)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = self._folder(checkpoint_path)
        assert self.lightning_module is not None
        if not self.lightning_module.strict_loading:
            raise CheckpointError(
                "strict_loading is False, but checkpoints are read strictly; read what fits with "
                "parallel3d.checkpoint.load into the part of the model that was saved"
            )
        info = checkpoints.load(path, self.lightning_module, self.optimizers or None)
        if "lightning" not in info.extra:
            raise CheckpointError(
                f"{path} was not saved by a Trainer; use parallel3d.checkpoint.load"
            )
        stored = io.BytesIO(info.extra["lightning"].numpy().tobytes())
        rest: Mapping[str, Any] = torch.load(stored, map_location="cpu", weights_only=weights_only)
        return {**rest, "state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}
