"""Hugging Face's Trainer for models that ``parallelize`` was applied to."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import DataLoader

try:
    import transformers
    from accelerate import Accelerator
    from accelerate.utils import recursively_apply
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import seed_worker, unwrap_peft_model
except ImportError as error:
    raise ImportError(
        "integrations.transformers needs transformers and accelerate; "
        "pip install transformers accelerate"
    ) from error

from parallel3d import checkpoint
from parallel3d._torch.autograd import torch_function_off
from parallel3d._util import dry_run
from parallel3d.errors import CheckpointError, MeshError, Parallel3dError
from parallel3d.fsdp import FSDPModule
from parallel3d.fsdp.inspect import note_ignored, unit_of
from parallel3d.mesh.joined import has_cp
from parallel3d.optim import clip_grad_norm_
from parallel3d.optim.accumulate import group_of
from parallel3d.tp.lora import is_peft_model

FOLDER = "parallel3d"
"""Folder in a Trainer's checkpoint that ``parallel3d.checkpoint`` writes."""

# Argument -> what to write instead. Each would give other numbers, or fail late on some rank.
_REFUSED = {
    "fsdp": "parallelize has sharded the model; leave fsdp out",
    "deepspeed": "parallelize has sharded the model; leave deepspeed out",
    "parallelism_config": "the sizes are those of the model's mesh; leave parallelism_config out",
    "fp16": "there is no loss scaling here; use bf16=True, or parallelize(mp_policy=) with bfloat16",
    "torch_compile": "use parallelize(compile=True)",
    "use_liger_kernel": "it replaces forwards that parallelize has adapted; leave it out",
    "auto_find_batch_size": "ranks would choose different sizes; set per_device_train_batch_size",
    "fp16_full_eval": "it would cast the sharded weights; use parallelize(mp_policy=)",
    "bf16_full_eval": "it would cast the sharded weights; use parallelize(mp_policy=)",
    "eval_use_gather_object": "only tensors are gathered, over the data ranks",
    "save_on_each_node": "checkpoints are written by all ranks, to a folder that all share",
}


class ParallelMixin:
    """Makes a subclass of transformers' Trainer train a model that ``parallelize`` was applied to::

        class MyTrainer(ParallelMixin, SomeTrainer): ...

    The mesh is that of the model's parameters. Ranks of one tp group read the same rows; the Trainer counts,
    averages and gathers over the data ranks. ``save_model`` writes a folder that ``from_pretrained`` loads. A
    checkpoint contains these files and those of ``parallel3d.checkpoint``: resuming is exact on the same
    mesh, and possible on another if the rows per step stay the same. For a model of ``get_peft_model``, both
    contain the adapters and other trained parameters, but not the frozen base, and
    ``PeftModel.from_pretrained`` loads them. Gradient accumulation reduce-scatters gradients in each
    micro-batch. ``bf16=True`` is autocast, unless the model's ``mp_policy`` computes in bfloat16 already.

    Raises:
        Parallel3dError: the model is not parallel or has parameters that are not, or an argument can't be
            used with a parallel model.
        MeshError: the model's mesh does not have all ranks.
    """

    # Of transformers' Trainer:
    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    label_smoother: Any
    gather_function: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        self._rng: Callable[[], None] | None = None
        self._items: _Items | None = None  # the last argument of the compute_loss that runs
        with _as_trl_expects([*args, *options.values()]) as self._settle:
            super().__init__(*args, **options)
        if self.label_smoother is not None and _is_causal_lm(unwrap_peft_model(self.model)):
            # Trainer shifts labels for classes that it knows by name, which parallelize has changed.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        for module in self.model.modules() if self._tp > 1 else ():
            code = getattr(vars(module).get("forward"), "__func__", None)
            if "fused_lm_head" in getattr(getattr(code, "__code__", None), "co_varnames", ()):
                self._adapt_fused_head(module)

    # What is parallel

    def create_accelerator_and_postprocess(self) -> None:
        if dry_run.active():  # the loss has no value that it could filter by
            self.args.logging_nan_inf_filter = False
        self._settle()
        group, tp = _data_ranks(self.model)
        self._check_arguments(tp)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        for plugin in ("fsdp_plugin", "deepspeed_plugin"):
            if getattr(self.accelerator.state, plugin, None) is not None:
                raise Parallel3dError(
                    f"accelerate's configuration asks for {plugin.removesuffix('_plugin')}, but "
                    "parallelize has sharded the model; start the program with torchrun"
                )
        self.accelerator.__class__ = _DataRanks
        self.accelerator.group = group
        if tp > 1:
            # The other way, in which the first rank reads for all, gives each rank rows of its own.
            self.accelerator.dataloader_config.dispatch_batches = False
        self.gather_function = self.accelerator.gather_for_metrics
        self._tp = tp
        self._autocasts = self.args.bf16 and self._computes_in() is None

    def _check_arguments(self, tp: int) -> None:
        args = self.args
        for name, instead in _REFUSED.items():
            value = getattr(args, name, None)
            if value:
                raise Parallel3dError(f"{name}={value!r} with a parallel model: {instead}")
        if args.world_size != dist.get_world_size():
            raise Parallel3dError(
                f"TrainingArguments knows {args.world_size} of {dist.get_world_size()} processes; start the "
                "program with torchrun, and give them use_cpu=True on a CPU"
            )
        if args.n_gpu > 1:
            raise Parallel3dError(
                f"one process has {args.n_gpu} devices; start one for each with torchrun"
            )
        if tp > 1 and args.accelerator_config.dispatch_batches:
            raise Parallel3dError(
                "dispatch_batches=True gives the ranks of a tp group different rows; leave it out"
            )
        if tp > 1 and args.train_sampling_strategy == "batch_rebalance":
            raise Parallel3dError(
                "train_sampling_strategy='batch_rebalance' gives the ranks of a tp group different rows; use "
                "'random', 'sequential' or 'group_by_length'"
            )
        if args.save_strategy != "no":
            self._check_adapters()
        dtype = self._computes_in()
        if args.bf16 and dtype not in (None, torch.bfloat16):
            raise Parallel3dError(
                f"bf16=True, but the model's mp_policy computes in {dtype}; leave one of them out"
            )

    def _check_adapters(self) -> None:
        """Raises Parallel3dError if the model has adapters that ``save_peft`` can't write."""
        model, what = self.model, None
        if is_peft_model(model):
            for name, config in model.peft_config.items():
                if config.is_prompt_learning:
                    what = f"{name!r}, of peft's {config.peft_type.value}, which computes what it stores"
        elif any(cls.__module__.startswith("peft.") for cls in type(model).__mro__):
            what = f"those of a {type(model).__name__}; use get_peft_model without mixed=True"
        elif getattr(model, "_hf_peft_config_loaded", False):
            what = "those of the model's own add_adapter; use peft's get_peft_model"
        if what is not None:
            raise Parallel3dError(
                f"Trainer can't save adapters: {what}. Or set save_strategy='no', and save what was trained "
                "with checkpoint.save(only='trainable')"
            )

    def _computes_in(self) -> torch.dtype | None:
        return unit_of(self.model).policy.param_dtype

    def _adapt_fused_head(self, module: nn.Module) -> None:
        """Called with a module to which TRL has given a fused head, if the model's head is split over tp.
        Raises Parallel3dError; subclasses may adapt the module."""
        raise Parallel3dError(
            f"{type(self).__name__} multiplies by lm_head.weight itself, of which a rank has 1/{self._tp}; "
            "use integrations.trl.SFTTrainer, or a mesh with tp=1"
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass  # it is on the mesh's

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return model

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator's clip_grad_norm_ takes any

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager:
        return self.accelerator.autocast() if self._autocasts else nullcontext()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        # A dry run's tensors take no class, and have no values that could be scaled wrongly.
        if not isinstance(num_items_in_batch, Tensor) or dry_run.active():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        self._items = items = num_items_in_batch.as_subclass(_Items)
        items.read = []
        # Hooks of parallelize read all inputs; this one is the last before the forward.
        hook = model.register_forward_pre_hook(lambda *_: items.read.clear())
        try:
            return super().compute_loss(model, inputs, return_outputs, items)  # type: ignore[misc]
        finally:
            self._items = None
            hook.remove()

    def get_tp_size(self) -> int:
        # By num_processes // get_tp_size() Trainer multiplies the loss of a forward with **kwargs, which it
        # expects to divide by the items of all ranks. BERT's heads and others take that number, and compute
        # the mean over their rank's items: there it must be multiplied by 1.
        if self._items is not None and not self._items.read:
            return self.accelerator.num_processes
        return super().get_tp_size()  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        rows = self._train_batch_size * args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return rows * self.accelerator.num_processes

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return super().floating_point_ops(inputs) // self._tp  # type: ignore[misc]  # summed over all ranks

    def _precompute_ref_logps(self, dataset: Any, *args: Any) -> Any:
        # TRL's first process writes a file, which of rows in memory has a random name on each.
        if not dataset.cache_files:
            place = [dataset._get_cache_file_path("")]
            dist.broadcast_object_list(place, 0)
            dataset._get_cache_file_path = lambda _: place[0]
        return super()._precompute_ref_logps(dataset, *args)  # type: ignore[misc]

    # Files

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        self._check_adapters()
        folder = Path(output_dir or self.args.output_dir)
        if is_peft_model(self.model):
            for name, place in self._adapters_in(folder):
                _replace(place, partial(checkpoint.save_peft, model=self.model, adapter_name=name))
        else:
            _replace(folder, partial(checkpoint.save_hf, model=self.model), "model*.safetensors*")
        if self.args.should_save:
            if is_peft_model(self.model):
                self.model.create_or_update_model_card(str(folder))
            for tokenizer in (
                self.processing_class,  # type: ignore[attr-defined]
                getattr(self.data_collator, "tokenizer", None),  # type: ignore[attr-defined]
            ):
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                    break
            torch.save(self.args, folder / "training_args.bin")
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {
            "scheduler": self.lr_scheduler.state_dict(),
            "rows": self.get_total_train_batch_size(self.args),
        }
        checkpoint.save(
            Path(output_dir) / FOLDER,
            self.model,
            _plain(self.optimizer),
            step=self.state.global_step,
            extra=extra,
            only="trainable" if is_peft_model(self.model) else None,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        pass  # checkpoint.save has

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).is_dir() and not is_peft_model(self.model):
            return  # the model is read with the optimizer; of peft's, buffers are with the adapters
        foreign = sorted(
            p.name
            for p in folder.glob("*")
            if p.name.startswith(("optimizer", "pytorch_model_fsdp"))
        )
        if foreign:
            call = "load_peft" if is_peft_model(self.model) else "load_hf"
            raise CheckpointError(
                f"{folder} has {foreign[0]}, of a Trainer without parallel3d, whose optimizer state can't be "
                f"read here; load its weights with checkpoint.{call} and train without resume_from_checkpoint"
            )
        self._load_weights(folder)

    def _load_weights(self, folder: Path) -> None:
        if not is_peft_model(self.model):
            checkpoint.load_hf(folder, self.model)
            return
        for name, place in self._adapters_in(folder):
            checkpoint.load_peft(place, self.model, adapter_name=name)

    def _adapters_in(self, folder: Path) -> list[tuple[str, Path]]:
        """Returns (name, the folder in which peft puts it, in ``folder``) of each adapter of the model."""
        names = self.model.peft_config
        return [(name, folder if name == "default" else folder / name) for name in names]

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None or not (Path(checkpoint_folder) / FOLDER).is_dir():
            return  # of save_only_model
        info = checkpoint.load(Path(checkpoint_folder) / FOLDER, self.model, _plain(self.optimizer))
        rows = self.get_total_train_batch_size(self.args)
        if info.extra["rows"] != rows and not self.args.ignore_data_skip:
            raise CheckpointError(
                f"a step of {checkpoint_folder} has {info.extra['rows']} rows, and here {rows}, so the data "
                "would continue elsewhere; change per_device_train_batch_size or "
                "gradient_accumulation_steps, or set ignore_data_skip=True"
            )
        self.lr_scheduler.load_state_dict(info.extra["scheduler"])
        self._rng = _setter_of_rng()

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        # Trainer calls it after it has skipped the rows that were trained on.
        if self._rng is not None:
            self._rng()
            self._rng = None

    def _load_best_model(self) -> None:
        self._load_weights(Path(self.state.best_model_checkpoint))


class Trainer(ParallelMixin, transformers.Trainer):
    """transformers' Trainer for a model that ``parallelize`` was applied to; see ``ParallelMixin``.

    It takes the arguments of transformers' Trainer, and a plain program changes in the import alone::

        p3d.parallelize(model, mesh, tp_plan="auto")
        Trainer(model, TrainingArguments(...), train_dataset=rows).train()
    """


class _DataRanks(Accelerator):
    """An Accelerator that counts data ranks as processes: all ranks of a tp group are one of them."""

    group: ProcessGroup

    @property
    def num_processes(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def process_index(self) -> int:
        return dist.get_rank(self.group)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **options: Any) -> Any:
        init = data_loader.worker_init_fn
        if isinstance(init, partial) and init.func is seed_worker:
            # What the workers draw is the same for the ranks of a tp group.
            data_loader.worker_init_fn = partial(init, rank=self.process_index)
        return super().prepare_data_loader(data_loader, *args, **options)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        def gathered(t: Tensor) -> Tensor:
            own = t.contiguous() if t.ndim else t.reshape(1)
            parts = [torch.empty_like(own) for _ in range(self.num_processes)]
            dist.all_gather(parts, own, group=self.group)
            return torch.cat(parts)

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        try:
            recursively_apply(lambda t: t, input_data, error_on_other_type=True)
        except TypeError as error:
            raise Parallel3dError(
                f"only tensors can be gathered over the data ranks, not {type(input_data).__name__}: {error}"
            ) from error
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(t: Tensor) -> Tensor:
            t = t.clone()
            dist.all_reduce(t, group=self.group)
            return t * (scale / self.num_processes if reduction == "mean" else scale)

        return recursively_apply(reduced, tensor, error_on_other_type=True)


class _Items(Tensor):
    """The number of a batch's items; ``read`` lists the names of functions that have computed with it."""

    read: list[Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        items = next((arg for arg in args if isinstance(arg, _Items)), None)
        with torch_function_off():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "to" and items is not None:
            result = result.as_subclass(_Items)
            result.read = items.read
        elif name not in ("__get__", "is_floating_point", "is_complex") and items is not None:
            items.read.append(name)
        return result


def _data_ranks(model: Any) -> tuple[ProcessGroup, int]:
    """Returns the group of the data ranks of a model's mesh, and the size of its tp axis."""
    if not isinstance(model, nn.Module):
        raise Parallel3dError(
            f"model is {model!r}; give Trainer model=, a parallel one, instead of model_init"
        )
    named = dict(model.named_parameters())
    meshes = [param.device_mesh for param in named.values() if isinstance(param, DTensor)]
    whole = [name for name, p in named.items() if p.requires_grad and not isinstance(p, DTensor)]
    if meshes and whole:
        raise Parallel3dError(
            f"parameter {whole[0]} is not sharded, so ranks would train different values; add adapters "
            "and heads before parallelize"
        )
    if not meshes or not isinstance(model, FSDPModule):
        raise Parallel3dError(
            f"{type(model).__name__} is not parallel; call parallel3d.parallelize on it first, or use "
            "transformers' own Trainer"
        )
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    if mesh.size() != dist.get_world_size():
        raise MeshError(
            f"the model's mesh has {mesh.size()} of {dist.get_world_size()} ranks; Trainer needs all"
        )
    if has_cp(mesh):
        raise MeshError(
            "the model's mesh has an axis cp: Trainer would give its ranks other samples, and cuts no "
            "sequences; use a mesh with cp=1, or a loop of your own"
        )
    names = mesh.mesh_dim_names or ()
    tp = mesh["tp"].size() if "tp" in names else 1
    data = mesh if tp == 1 else mesh[tuple(name for name in names if name != "tp")]
    group = group_of(data, "Trainer")
    assert group is not None
    return group, tp


def _is_causal_lm(model: nn.Module) -> bool:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return any(cls.__name__ in names for cls in type(model).__mro__)


def _replace(folder: Path, write: Callable[[Path], None], old: str | None = None) -> None:
    """Calls ``write`` with a new folder, on all ranks, and moves what it wrote into ``folder``, after
    removing files there that match ``old``. ``save_hf`` and ``save_peft`` would replace all of ``folder``."""
    new = folder / f".{FOLDER}-weights"
    write(new)
    if dist.get_rank() == 0:
        for path in folder.glob(old) if old else ():
            path.unlink()
        for file in new.iterdir():
            os.replace(file, folder / file.name)
        new.rmdir()


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _setter_of_rng() -> Callable[[], None]:
    """Returns a function that sets the random generators to the states that they have now."""
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.accelerator.is_available():
        device = torch.get_device_module()
        states.append((device.set_rng_state, device.get_rng_state()))

    def set_all() -> None:
        for function, state in states:
            function(state)

    return set_all


# What TRL's DPOTrainer does to a parallel model before it trains: it adds an adapter ``ref`` to one with
# adapters, whose values it copies from ``default``; and for log-probs that are computed before the training
# it names a file by a hash of all weights.


@contextmanager
def _as_trl_expects(given: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Context manager for the ``__init__`` of a TRL Trainer that is called with the arguments ``given``.

    Yields a function to call once TRL has copied the values of an adapter to a new one: it makes the new
    parameters plain and frozen ones, whole on each rank and in no unit.

    Raises:
        Parallel3dError: TRL adds an adapter to a model with tensor parallelism.
    """
    models = [m for m in given if isinstance(m, nn.Module) and unit_of(m) is not None]
    hashes = any(getattr(each, "precompute_ref_log_probs", False) for each in given)
    added: list[tuple[nn.Module, str]] = []
    for model in models:
        if is_peft_model(model):
            vars(model)["add_adapter"] = _adder(model, added)
            # The reference is a forward between another one and its backward, which reads the head's weight
            # outside of the head: it must find there what its own forward has left.
            cast(FSDPModule, model).set_keep_between_forwards(True)
        if hashes:
            vars(model)["state_dict"] = _digester(model)

    def settle() -> None:
        while added:
            module, name = added.pop()
            local = cast(DTensor, module._parameters[name]).to_local()
            whole = nn.Parameter(local, requires_grad=False)
            module._parameters[name] = whole
            note_ignored([module], {id(whole)})  # peft unfreezes it while the reference is computed

    try:
        yield settle
    finally:
        for model in models:
            vars(model).pop("add_adapter", None)
            vars(model).pop("state_dict", None)


def _adder(model: Any, added: list[tuple[nn.Module, str]]) -> Callable[..., None]:
    add = model.add_adapter

    def add_adapter(name: str, config: Any, *args: Any, **options: Any) -> None:
        """Adds an adapter, unless it was there before ``parallelize``. Its parameters are whole DTensors
        until the function that ``_as_trl_expects`` yields is called, so that TRL can copy to them."""
        if name in model.peft_config:
            return
        default = {k: p for k, p in model.named_parameters() if isinstance(p, DTensor)}
        sizes = (
            dict(zip(p.device_mesh.mesh_dim_names or (), p.device_mesh.shape, strict=False))
            for p in default.values()
        )
        if any(size.get("tp", 1) > 1 for size in sizes):
            raise Parallel3dError(
                f"the Trainer adds the adapter {name!r}, a copy of 'default', to a model with tensor "
                "parallelism, which would not split it; use a mesh with tp=1"
            )
        add(name, config, *args, **options)
        for path, param in list(model.named_parameters()):
            twin = default.get(path.replace(f".{name}.", ".default."))
            if isinstance(param, DTensor) or twin is None:
                continue
            mesh = twin.device_mesh
            owner, _, attribute = path.rpartition(".")
            module = model.get_submodule(owner)
            local = param.detach().to(unit_of(model).policy.param_dtype or twin.dtype)
            whole = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
            module._parameters[attribute] = nn.Parameter(whole, requires_grad=False)
            added.append((module, attribute))

    return add_adapter


def _digester(model: nn.Module) -> Callable[[], dict[str, Tensor]]:
    def state_dict() -> dict[str, Tensor]:
        """Returns a hash of all ranks' shards in place of the weights, which no rank has as a whole."""
        mine = hashlib.sha256()
        for name, value in sorted(type(model).state_dict(model).items()):
            local = value.to_local() if isinstance(value, DTensor) else value
            mine.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            values = local.detach().cpu().contiguous().flatten().view(torch.uint8)
            mine.update(values.numpy().tobytes())
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, mine.hexdigest())
        digest = hashlib.sha256("".join(each).encode()).digest()
        return {"": torch.tensor(list(digest), dtype=torch.uint8)}

    return state_dict
