"""The engines that an audit trains on: ours, torch's, accelerate's, transformers' Trainer, Megatron-FSDP.

An engine is a subclass of ``Engine``; ``ENGINES`` has those of this file by name, and a user may give one of
his own. Their methods run on every rank of a process group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from parallel3d import checkpoint
from parallel3d._torch.fully_shard import plain_name
from parallel3d._util.units import find_units
from parallel3d.mesh import build_mesh
from parallel3d.optim import accumulate, clip_grad_norm_
from parallel3d.parallelize import parallelize
from parallel3d.testing.relations.program import Program, Result, Variant

ENGINES: dict[str, type[Engine]] = {}
"""Name -> engine, of all in this file."""


class Engine:
    """How one library trains a program on several ranks; here one plain process.

    Args:
        program: what is trained.
        variant: how this training differs from others of it.

    Attributes:
        name: the name by which users select it.
        package: the library that must be installed.
        axes: the axes of the mesh that it supports.
        never: variants that it doesn't support -> why.
    """

    name: ClassVar[str] = "plain"
    package: ClassVar[str] = "torch"
    axes: ClassVar[tuple[str, ...]] = ("replicate", "shard", "cp", "tp", "ep")
    never: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__ and "name" in vars(cls):
            ENGINES[cls.name] = cls

    def __init__(self, program: Program, variant: Variant) -> None:
        self.program, self.variant = program, variant
        self.result = Result()
        self.in_step = False
        self.data_rank = 0
        if dist.is_initialized():
            self.data_rank = program.layout.data_rank(dist.get_rank())
        self.model: nn.Module = nn.Identity()
        self.optimizer: Any = None

    @classmethod
    def unable(cls, program: Program, variant: str) -> str:
        """Returns why it can't train ``program`` in this variant (a field's name, or ``""``), or ``""``."""
        if find_spec(cls.package) is None:
            return f"{cls.package} is not installed"
        sizes = program.layout.as_dict(views=True)
        lacking = [axis for axis, size in sizes.items() if size > 1 and axis not in cls.axes]
        if lacking:
            return f"it has no {' and no '.join(lacking)} here"
        return cls.never.get(variant, "")

    # -- what an engine says of itself ---------------------------------------------------------------

    def make(self, model: nn.Module) -> None:
        """Sets ``model`` and ``optimizer``."""
        self.model = model
        self.optimizer = self.program.optimizer(model.parameters())

    def accumulate(self, batches: Sequence[Any]) -> Iterator[Any]:
        """Yields each micro-batch, as a user of the engine writes the loop."""
        yield from batches

    def backward(self, loss: Tensor, count: int) -> None:
        """Runs the backward of one of ``count`` micro-batches' losses."""
        (loss / count).backward()

    def norm(self) -> float | None:
        """Returns the global gradient norm as the engine's way to clip has it; None: it has none."""
        return None

    def save(self, folder: Path) -> None:
        """Writes model and optimizer."""
        model, optim = dcp_state.get_state_dict(self.model, _plain(self.optimizer))
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Reads what ``save`` wrote into a new model and optimizer."""
        optimizer = _plain(self.optimizer)
        model, optim = dcp_state.get_state_dict(self.model, optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
        dcp_state.set_state_dict(
            self.model, optimizer, model_state_dict=model, optim_state_dict=optim
        )

    def export(self) -> Mapping[str, Any]:
        """Returns the whole state dict, as a user would write it to a file."""
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        return dcp_state.get_model_state_dict(self.model, options=options)

    # -- the training --------------------------------------------------------------------------------

    def train(self) -> Result:
        """Trains, and returns what it gave."""
        program, variant = self.program, self.variant
        self.prepare()
        for step in range(program.steps):
            if variant.resumed and step == program.steps - 1:
                self.resume()
            if step == program.steps - 1:
                self.result.before_last = self.held()
            batches = self.batches(step)
            if variant.frozen and step == 0:
                frozen = program.first_trained(self.model)
                set_trained(self.model, frozen, False)
            self.in_step = True
            metrics = self.take_step(batches)
            self.in_step = False
            self.note(metrics)
            if variant.frozen and step == 0:
                set_trained(self.model, frozen, True)
        return self.ended()

    def batches(self, step: int) -> list[Any]:
        """Returns this rank's micro-batches."""
        return self.program.batches(step, self.data_rank, self.variant)

    def prepare(self) -> None:
        """Makes a new model and optimizer; from now on gradients are noted at the optimizer's step."""
        self.make(self.program.model())
        self.watch(self.optimizer)

    def watch(self, optimizer: Any) -> None:
        """Notes gradients whenever ``optimizer`` steps, but for the steps by which torch makes its state."""
        _plain(optimizer).register_step_pre_hook(self.note_grads)

    def resume(self) -> None:
        """Goes on with a new model and optimizer, which load what these saved."""
        with shared_folder() as folder:
            self.save(folder)
            self.prepare()
            with torch.no_grad():  # so that what is not loaded shows
                for param in self.model.parameters():
                    param.mul_(1.5)
            self.load(folder)

    def take_step(self, batches: Sequence[Any]) -> Any:
        """Takes the user's step, or one as a user of the engine writes it."""
        program = self.program
        if program.step is not None:
            return program.step(self.model, self.optimizer, batches)
        total = torch.zeros((), dtype=torch.float64)
        for inputs in self.accumulate(batches):
            loss = program.loss_of(self.model, inputs)
            self.backward(loss, len(batches))
            total += loss.detach().double() / len(batches)
        norm: float | None = None
        try:
            norm = self.norm()
        except RuntimeError as error:  # torch's, where parameters are on several meshes
            self.result.no_norm = f"{type(error).__name__}: {str(error)[:200]}"
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total if norm is None else (total, norm)

    def note(self, metrics: Any) -> None:
        """Notes a step's loss, averaged over the ranks, and its norm."""
        loss, norm = metrics if isinstance(metrics, tuple) else (metrics, None)
        value = torch.as_tensor(loss).detach().double().reshape(()).clone()
        if dist.is_initialized() and not self.variant.plain:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.result.losses.append(float(value))
        if norm is not None:
            self.result.norms.append(float(whole(torch.as_tensor(norm))))

    def note_grads(self, *_: Any) -> None:
        """Notes the gradients that the optimizer is about to use."""
        if not self.in_step:
            return
        self.in_step = False  # an optimizer's step may call that of the class above it
        grads: dict[str, Tensor | None] = {
            name: None if p.grad is None else whole(p.grad).detach().cpu().clone()
            for name, p in named(self.model)
        }
        self.result.grads.append(grads)
        squares = [float((g.double() ** 2).sum()) for g in grads.values() if g is not None]
        self.result.own_norms.append(sum(squares) ** 0.5)

    def held(self) -> dict[str, Tensor]:
        """Returns the whole parameters."""
        return {name: whole(p).detach().cpu().clone() for name, p in named(self.model)}

    def ended(self) -> Result:
        """Returns the result, with the weights and what is exported."""
        self.result.weights = self.held()
        self.result.exported = {
            plain_name(name): value.detach().cpu()
            for name, value in self.export().items()
            if isinstance(value, Tensor)
        }
        return self.result


class Plain(Engine):
    """One plain process; the reference."""

    def export(self) -> Mapping[str, Any]:
        return self.model.state_dict()


class Ours(Engine):
    """parallel3d."""

    name, package = "parallel3d", "parallel3d"
    engine: ClassVar[str] = "parallel3d"

    def make(self, model: nn.Module) -> None:
        program, variant = self.program, self.variant
        self.mesh = build_mesh(program.layout, device_type="cpu")
        self.model = parallelize(
            model,
            self.mesh,
            tp_plan=program.tp_plan,
            engine=self.engine,  # type: ignore[arg-type]
            **program.options
            | ({"activation_checkpointing": True} if variant.recomputed else {})
            | ({"compile": True} if variant.compiled else {}),
        )
        self.optimizer = program.optimizer(self.model.parameters())

    def batches(self, step: int) -> list[Any]:
        samples, shard_batch = self.program.samples, self.program.shard_batch
        if shard_batch is None:
            return super().batches(step)
        cut = [samples.cut(batch, shard_batch, self.mesh) for batch in super().batches(step)]
        return [batch for (batch,) in cut] if samples.names else cut

    def accumulate(self, batches: Sequence[Any]) -> Iterator[Any]:
        yield from accumulate(self.model, batches)

    def norm(self) -> float | None:
        return float(whole(clip_grad_norm_(self.model, 1e30)))

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.optimizer, step=0)

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.model, self.optimizer)


class Torchs(Ours):
    """torch's ``fully_shard`` and ``parallelize_module``, which ``parallelize(engine="torch")`` calls."""

    name, package, engine = "torch", "torch", "torch"
    axes = ("replicate", "shard", "tp")
    save, load = Engine.save, Engine.load

    def accumulate(self, batches: Sequence[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, 1):
            for module in self.model.modules():
                if isinstance(module, torch.distributed.fsdp.FSDPModule):
                    module.set_requires_gradient_sync(number == len(batches), recurse=False)
            yield batch

    def norm(self) -> float | None:
        norm = nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        )
        return float(whole(norm))


class _Hf(Engine):
    """What accelerate and transformers' Trainer share: FSDP2 as accelerate applies it."""

    axes = ("replicate", "shard")
    never: ClassVar[dict[str, str]] = {"compiled": "not tried"}

    def plugin(self, model: nn.Module) -> dict[str, Any]:
        """The options of FSDP2, with the classes of the model's blocks."""
        units = find_units(model).modules
        classes = sorted({type(m).__name__ for unit in units for m in unit if m is not model})
        return {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": classes,
            "activation_checkpointing": self.variant.recomputed,
        }


class Accelerates(_Hf):
    """accelerate's Accelerator with FSDP2."""

    name, package = "accelerate", "accelerate"

    def train(self) -> Result:
        with accelerates_state():
            return super().train()

    def make(self, model: nn.Module) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import ParallelismConfig

        layout = self.program.layout
        config = None
        if layout.replicate > 1:
            config = ParallelismConfig(
                dp_replicate_size=layout.replicate, dp_shard_size=layout.shard
            )
        self.accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2, cpu_ram_efficient_loading=False, **self.plugin(model)
            ),
            parallelism_config=config,
            gradient_accumulation_steps=self.variant.micro_batches,
        )
        optimizer = self.program.optimizer(model.parameters())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def accumulate(self, batches: Sequence[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, 1):
            with self.accelerator.accumulate(self.model):
                self.accelerator.gradient_state._set_sync_gradients(number == len(batches))
                yield batch

    def backward(self, loss: Tensor, count: int) -> None:
        self.accelerator.backward(loss)  # divides by the number of micro-batches

    def norm(self) -> float | None:
        return float(whole(self.accelerator.clip_grad_norm_(self.model.parameters(), 1e30)))


class Trainers(_Hf):
    """transformers' Trainer with FSDP2, which has a step of its own."""

    name, package = "transformers", "transformers"

    @classmethod
    def unable(cls, program: Program, variant: str) -> str:
        why = super().unable(program, variant)
        return why or ("the Trainer has a step of its own" if program.step is not None else "")

    def train(self) -> Result:
        steps = self.program.steps
        with accelerates_state(), shared_folder() as folder:
            if self.variant.resumed:
                self.run(folder, steps - 1, save_steps=steps - 1)
                self.run(folder, steps, resume=str(folder / f"checkpoint-{steps - 1}"))
            else:
                self.run(folder, steps)
            return self.ended()

    def run(
        self, folder: Path, steps: int, *, save_steps: int = 0, resume: str | None = None
    ) -> None:
        """Trains by a Trainer up to step ``steps``."""
        from transformers import Trainer, TrainerCallback, TrainingArguments

        engine, program = self, self.program
        model = program.model()
        frozen = program.first_trained(model) if self.variant.frozen else []
        sums: list[Tensor] = []

        class Own(Trainer):
            def get_train_dataloader(self) -> Any:
                each = [batch for step in range(steps) for batch in engine.batches(step)]
                return DataLoader([{"batch": batch} for batch in each], collate_fn=_first)  # type: ignore[arg-type]  # a list is one

            def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
                return program.loss_of(model, inputs["batch"])

            def create_optimizer(self, *_: Any, **__: Any) -> Any:
                made: Any = self.model
                self.optimizer = program.optimizer(made.parameters())
                engine.watch(self.optimizer)
                return self.optimizer

            def training_step(self, *given: Any, **options: Any) -> Tensor:
                engine.in_step = True
                loss = super().training_step(*given, **options)
                sums.append(loss.detach().double())
                return loss

        class Notes(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                engine.in_step = False
                set_trained(model, frozen, True)
                engine.note(sum(sums[1:], sums[0]))
                sums.clear()

            def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
                if "grad_norm" in logs:
                    engine.result.norms.append(float(logs["grad_norm"]))

        set_trained(model, frozen, False)
        plugin = self.plugin(model)
        arguments = TrainingArguments(
            output_dir=str(folder),
            gradient_accumulation_steps=self.variant.micro_batches,
            max_steps=steps,
            logging_steps=1,
            save_strategy="steps" if save_steps else "no",
            save_steps=max(save_steps, 1),
            max_grad_norm=1e30,
            lr_scheduler_type="constant",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            remove_unused_columns=False,
            fsdp=True,  # type: ignore[arg-type]  # words of older versions
            fsdp_config={
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": plugin["transformer_cls_names_to_wrap"],
                "activation_checkpointing": plugin["activation_checkpointing"],
            },
        )
        trainer = Own(model, arguments, callbacks=[Notes()])
        self.model = model
        trainer.train(resume_from_checkpoint=resume)


class MegatronFSDP(Engine):
    """NVIDIA's megatron_fsdp, on GPUs only. This adapter has not been run."""

    name, package = "megatron_fsdp", "megatron_fsdp"
    axes = ("shard",)
    never: ClassVar[dict[str, str]] = {
        "recomputed": "it has no activation checkpointing of its own",
        "compiled": "not tried",
    }

    @classmethod
    def unable(cls, program: Program, variant: str) -> str:
        why = super().unable(program, variant)
        return why or ("" if torch.cuda.is_available() else "it runs on NVIDIA GPUs only")

    def make(self, model: nn.Module) -> None:
        from megatron_fsdp import fully_shard

        units = [type(module) for unit in find_units(model).modules for module in unit]
        mesh = build_mesh(self.program.layout, device_type="cuda")
        self.model, self.optimizer = fully_shard(
            module=model.cuda(),
            optimizer=self.program.optimizer(model.parameters()),
            device_mesh=mesh,
            dp_shard_dim="shard",
            fsdp_unit_modules=list(dict.fromkeys(units)),
        )


# -- parts ---------------------------------------------------------------------------------------------


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters by the plain model's names."""
    for name, param in model.named_parameters():
        yield plain_name(name.removeprefix("module.")), param


def _first(rows: list[Any]) -> Any:
    """Returns the only row of a batch of one."""
    return rows[0]


def set_trained(model: nn.Module, names: Collection[str], trained: bool) -> None:
    """Thaws the named parameters, or freezes them."""
    for name, param in named(model):
        if name in names:
            param.requires_grad_(trained)


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a DTensor, on every rank; other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the torch optimizer within a library's wrapper of it."""
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder that all ranks of this host use; it is removed at the end."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as own:
        names = [own]
        dist.broadcast_object_list(names)
        try:
            yield Path(names[0]) / "checkpoint"
        finally:
            dist.barrier()


@contextmanager
def accelerates_state(*, fsdp: bool = True, cpu: bool | None = None) -> Iterator[None]:
    """Gives accelerate a new global state within the body.

    Args:
        fsdp: whether FSDP is used. accelerate allows it on accelerators only, so without GPUs it is made to
            believe that there are some; it computes on the CPU nevertheless.
        cpu: whether accelerate uses the CPU; by default if there is no GPU.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def make(state: Any, *given: Any, **options: Any) -> None:
        initialize(state, *given, **options)
        if fsdp and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    initialize: Callable[..., None] = PartialState.__init__
    PartialState.__init__ = make  # TrainingArguments makes another
    reset()
    try:
        PartialState(cpu=not torch.cuda.is_available() if cpu is None else cpu)
        yield
    finally:
        PartialState.__init__ = initialize
        reset()
