"""A user's program as an audit trains it, in variants, and the engines: ours, torch's, accelerate's,
transformers' Trainer, Megatron-FSDP.

An engine is a subclass of ``Engine``; ``ENGINES`` has those of this file by name, and a user may give one of
his own. Their methods run on every rank of a process group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import itemgetter
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
from parallel3d._util.trees import cast_floats
from parallel3d._util.units import find_units
from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.optim import accumulate, clip_grad_norm_
from parallel3d.parallelize import parallelize
from parallel3d.testing.samples import LossFn, Samples, built, cast_model

MICRO_BATCHES = 2  # samples of a data rank in each step

Step = Callable[[nn.Module, torch.optim.Optimizer, Sequence[Any]], Any]
"""``step(model, optimizer, micro_batches)`` -> loss, or (loss, gradient norm): a user's training step."""


@dataclass(frozen=True)
class Variant:
    """How a training differs from the base, the training with each field's default."""

    plain: bool = False  # the plain model, in one process, on all ranks' samples in one batch
    micro_batches: int = 1  # parts into which a data rank's batch is cut
    rotated: bool = False  # each data rank gets the samples of the next one
    frozen: bool = False  # the parameters of the first module that has some, in the first step
    resumed: bool = False  # a new model and optimizer, which load a checkpoint, take the last step
    recomputed: bool = False  # activations are, in the backward
    compiled: bool = False  # blocks are
    again: bool = False  # a repetition without a change


@dataclass
class Result:
    """What a training gives: numbers for each step, and whole tensors by parameter's name."""

    losses: list[float] = field(default_factory=list)  # means over all ranks
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # at the optimizer's step
    norms: list[float] = field(default_factory=list)  # of the engine or the user's step, if any
    no_norm: str = ""  # why the engine could not compute a norm
    own_norms: list[float] = field(default_factory=list)  # computed from ``grads``
    before_last: dict[str, Tensor] = field(default_factory=dict)  # parameters before the last step
    weights: dict[str, Tensor] = field(default_factory=dict)  # and after it
    exported: dict[str, Tensor] = field(
        default_factory=dict
    )  # the state dict that a user would write


def sgd(params: Any) -> torch.optim.Optimizer:
    """Returns SGD with momentum: unlike Adam, it keeps a gradient's factor and enlarges no rounding."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Program:
    """What is trained: arguments of ``audit``, of which ``tp_plan`` and ``options`` are ``parallelize``'s."""

    build: Callable[[], nn.Module]
    samples: Samples
    loss: LossFn
    layout: MeshLayout
    tp_plan: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    step: Step | None = None  # None: the engine's own way to accumulate, and no clipping
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    steps: int = 3
    seed: int = 0
    shard_batch: Callable[..., Any] | None = None

    def model(self) -> nn.Module:
        """Returns the plain model in float64, with the same values on every rank."""
        return cast_model(built(self.build, self.seed), torch.float64)

    def batches(self, step: int, data_rank: int, variant: Variant) -> list[Any]:
        """Returns the micro-batches of a data rank in one step: tuples of inputs, as ``variant`` says."""
        ranks, count = self.layout.data_size, MICRO_BATCHES
        first = step * ranks * count
        if variant.plain:
            return [self._joined(range(first, first + ranks * count))]
        data_rank = (data_rank + variant.rotated) % ranks
        first += data_rank * count
        each = count // variant.micro_batches
        return [self._joined(range(n, n + each)) for n in range(first, first + count, each)]

    def _joined(self, numbers: range) -> tuple[Tensor, ...]:
        samples = [cast_floats(self.samples(number), torch.float64) for number in numbers]
        joined = []
        for parts in zip(*samples, strict=True):
            if len({part.shape[1:] for part in parts}) > 1:
                shapes = " and ".join(sorted({str(tuple(part.shape)) for part in parts}))
                raise Parallel3dError(
                    f"the inputs of samples have shapes {shapes}: an audit joins samples along dim 0, so "
                    "that their other dims must be equal; pad them"
                )
            joined.append(torch.cat(parts) if parts[0].dim() else parts[0])
        return tuple(joined)

    def loss_of(self, model: nn.Module, inputs: Any) -> Tensor:
        return self.loss(model, *inputs) if isinstance(inputs, tuple) else self.loss(model, inputs)

    def first_trained(self, model: nn.Module) -> list[str]:
        """Returns names of the trained parameters of the first module with some; none if those are all."""
        trained = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad]
        owner = trained[0].rpartition(".")[0] if trained else ""
        first = [name for name in trained if name.rpartition(".")[0] == owner]
        return first if len(first) < len(trained) else []


ENGINES: dict[str, type[Engine]] = {}
"""Name -> engine, of all in this file."""


class Engine:
    """How one library trains a program on several ranks; this base class does it with a plain model.

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
        """Returns why the engine can't train a variant (the field that differs, or ``""``), or ``""``."""
        if find_spec(cls.package) is None:
            return f"{cls.package} is not installed"
        sizes = program.layout.as_dict(views=True)
        lacking = [axis for axis, size in sizes.items() if size > 1 and axis not in cls.axes]
        if lacking:
            return f"it has no {' and no '.join(lacking)} here"
        return cls.never.get(variant, "")

    # -- what an engine says of itself ---------------------------------------------------------------

    def make(self, model: nn.Module) -> None:
        """Prepares ``model`` as the library does, and sets ``self.model`` and ``self.optimizer``."""
        self.model = model
        self.optimizer = self.program.optimizer(model.parameters())

    def accumulate(self, batches: Sequence[Any]) -> Iterator[Any]:
        """Yields each micro-batch, in a loop as the library's users write it to accumulate gradients."""
        yield from batches

    def backward(self, loss: Tensor, count: int) -> None:
        """Runs the backward of one of ``count`` micro-batches' losses."""
        (loss / count).backward()

    def norm(self) -> float | None:
        """Returns the gradient norm over all parameters, by the library's function for clipping, or None."""
        return None

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of model and optimizer."""
        model, optim = dcp_state.get_state_dict(self.model, _plain(self.optimizer))
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Reads a checkpoint of ``save`` into a new model and optimizer."""
        optimizer = _plain(self.optimizer)
        model, optim = dcp_state.get_state_dict(self.model, optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
        dcp_state.set_state_dict(
            self.model, optimizer, model_state_dict=model, optim_state_dict=optim
        )

    def export(self) -> Mapping[str, Any]:
        """Returns the state dict of whole tensors that a user would write to a file."""
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        return dcp_state.get_model_state_dict(self.model, options=options)

    # -- the training --------------------------------------------------------------------------------

    def train(self) -> Result:
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
        return self.program.batches(step, self.data_rank, self.variant)

    def prepare(self) -> None:
        """Makes a new model and optimizer, whose gradients are recorded at each of its steps."""
        self.make(self.program.model())
        self.watch(self.optimizer)

    def watch(self, optimizer: Any) -> None:
        """Registers a hook that records gradients when ``optimizer`` steps within a training step."""
        _plain(optimizer).register_step_pre_hook(self.note_grads)

    def resume(self) -> None:
        """Saves a checkpoint, and goes on with a new model and optimizer that have loaded it."""
        with shared_folder() as folder:
            self.save(folder)
            self.prepare()
            with torch.no_grad():  # so that what is not loaded shows
                for param in self.model.parameters():
                    param.mul_(1.5)
            self.load(folder)

    def take_step(self, batches: Sequence[Any]) -> Any:
        """Takes one training step: the user's ``step``, or one as the library's users write it."""
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
        """Records what a step returned: its loss, as the mean over ranks, and the gradient norm."""
        loss, norm = metrics if isinstance(metrics, tuple) else (metrics, None)
        value = torch.as_tensor(loss).detach().double().reshape(()).clone()
        if dist.is_initialized() and not self.variant.plain:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.result.losses.append(float(value))
        if norm is not None:
            self.result.norms.append(float(whole(torch.as_tensor(norm))))

    def note_grads(self, *_: Any) -> None:
        """Records the gradients that the optimizer is about to use; called before each of its steps."""
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
        return {name: whole(p).detach().cpu().clone() for name, p in named(self.model)}

    def ended(self) -> Result:
        """Completes the result, with the weights and the exported state dict, and returns it."""
        self.result.weights = self.held()
        self.result.exported = {
            plain_name(name): value.detach().cpu()
            for name, value in self.export().items()
            if isinstance(value, Tensor)
        }
        return self.result


class Plain(Engine):
    """One plain process, with which others are compared."""

    def export(self) -> Mapping[str, Any]:
        return self.model.state_dict()


class Ours(Engine):
    """Trains with parallel3d."""

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
    """Trains with torch's ``fully_shard`` and ``parallelize_module``, by ``parallelize(engine="torch")``."""

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
    """Base of accelerate and transformers' Trainer, with FSDP2 as accelerate applies it."""

    axes = ("replicate", "shard")
    never: ClassVar[dict[str, str]] = {"compiled": "not tried"}

    def plugin(self, model: nn.Module) -> dict[str, Any]:
        """Returns the options of FSDP2, with the classes of the model's blocks as units."""
        units = find_units(model).modules
        classes = sorted({type(m).__name__ for unit in units for m in unit if m is not model})
        return {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": classes,
            "activation_checkpointing": self.variant.recomputed,
        }


class Accelerates(_Hf):
    """Trains with accelerate's Accelerator and FSDP2."""

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
    """Trains with transformers' Trainer and FSDP2; the user can't give it a step."""

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
        """Trains by a Trainer until ``steps`` steps are done, from the checkpoint ``resume`` on if given."""
        from transformers import Trainer, TrainerCallback, TrainingArguments

        engine, program = self, self.program
        model = program.model()
        frozen = program.first_trained(model) if self.variant.frozen else []
        sums: list[Tensor] = []

        class Own(Trainer):
            def get_train_dataloader(self) -> Any:
                each = [batch for step in range(steps) for batch in engine.batches(step)]
                rows: Any = [{"batch": batch} for batch in each]
                return DataLoader(rows, collate_fn=itemgetter(0))  # of a batch of one

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
    """Trains with NVIDIA's megatron_fsdp, on GPUs only. This adapter has not been run."""

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
    """Yields (the plain model's name, parameter) for each parameter."""
    for name, param in model.named_parameters():
        yield plain_name(name.removeprefix("module.")), param


def set_trained(model: nn.Module, names: Collection[str], trained: bool) -> None:
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
    """Yields a path for a checkpoint, the same on all ranks of this host; removes it at the end."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as own:
        names = [own]
        dist.broadcast_object_list(names)
        try:
            yield Path(names[0]) / "checkpoint"
        finally:
            dist.barrier()


@contextmanager
def accelerates_state(*, fsdp: bool = True, cpu: bool | None = None) -> Iterator[None]:
    """Gives accelerate a new global state in the body.

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
