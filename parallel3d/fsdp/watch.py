"""What the engine watches of torch and of the user's program, in this process as a whole: all of it is here.

- Autograd's engine, each call of it from Python (``unit.run_backward``): sharded Parameters as ``inputs``
  of a backward, and a loss that is nan on some ranks only. In errors it names units: whose weights have
  changed since the forward, or which a backward reads while they are freed.
- Parameters that are registered in modules: one that replaces a unit's gives it its values at once.
- ``.data`` of Parameters and DTensors: a write that would be lost, as it is one to an unsharded parameter, or
  to no more than a DTensor's metadata.
- ``+ - * / @`` of a DTensor and a plain tensor: a penalty on sharded parameters, added to a loss.
- DTensor's dispatch: a plain tensor that DTensors change in place, of which torch's error has no text.
- ``step`` of optimizers: states of another layout or dtype than the parameter's.
- Exceptions that nobody catches: sharded parameters beside plain tensors.

``PARALLEL3D_WATCH=0`` in the environment leaves all of these as torch has them. What they catch is then
torch's own error, a write by ``.data`` is lost, a Parameter that was assigned is taken over by the next
forward, and no training step is audited. Numbers depend on three more, which stay: the version counters of
unsharded parameters (``bucket.Versions``), which are the engine's own tensors; optimizers' steps are counted,
as fused ones change weights without a new version; and steps on DTensors and plain tensors are two calls.

What a unit watches of its own modules, outputs and gradients is in ``unit`` and ``group``; options and guards
that were asked for have hooks of their own.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallel3d._layout.packed import packed_as_param
from parallel3d._torch.autograd import route_data, untraced, wrap_backward
from parallel3d._torch.dtensor import watch_writes, wrap_operators
from parallel3d._torch.optimizers import convert_loaded, step_dtensors_apart, wrap_steps
from parallel3d._torch.saved import saved_by
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.bucket import numbered_buckets
from parallel3d.fsdp.group import WATCHED_BY
from parallel3d.fsdp.param import (
    OptimizerSteps,
    OwnSetattr,
    ShardedParam,
    lost_write,
    named,
    owner_at,
    owner_of,
    unsharded_mark,
)

SWITCH = "PARALLEL3D_WATCH"


@cache
def watch_torch(run_backward: Callable[..., Any]) -> None:
    """Installs all hooks and wrappers of this file, once in a process: when the first unit is made."""
    register_optimizer_step_post_hook(_count_step)
    step_dtensors_apart()
    convert_loaded(packed_as_param)
    if os.environ.get(SWITCH, "1") == "0":
        return
    wrap_backward(run_backward)
    register_module_parameter_registration_hook(_take_assigned)  # type: ignore[arg-type]
    for kind in (nn.Parameter, DTensor):
        route_data(kind, _read_data, _write_data)
    wrap_operators(_operate)
    watch_writes(_refuse_write)
    wrap_steps(_explain_step)
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, at: Any) -> None:
        message = explain_mixed(error)
        if message is not None:
            error.add_note(message)
        before(kind, error, at)

    sys.excepthook = hook


# Steps of optimizers.


@untraced
def _count_step(optimizer: Optimizer, *_: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # These may be DTensors of no unit: master weights to copy from.
    if not any(isinstance(param, DTensor) for param in params):
        return
    OptimizerSteps.total += 1
    steps = OptimizerSteps.of_alive.get(optimizer)
    if steps is None:
        steps = OptimizerSteps.of_alive[optimizer] = OptimizerSteps()
        weakref.finalize(optimizer, OptimizerSteps.of_deleted.append, steps).atexit = False
    steps.last = OptimizerSteps.total
    if len(steps.params) != len(params):
        steps.params = set(map(id, params))
        steps.copies = any(isinstance(p, DTensor) and owner_of(p) is None for p in params)


# Parameters that are assigned where a unit has one (``module.weight = nn.Parameter(...)``,
# ``load_state_dict(assign=True)``) give it their values at once: an optimizer that is made afterwards trains
# what forward computes with. What else was put into modules, ``check_registered`` looks for.


def _take_assigned(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
    """Torch's global hook on registration of Parameters: if ``given`` replaces a unit's parameter, copies its
    values to that and returns the sharded Parameter to register instead. None: register ``given``."""
    owner = owner_at(module, name)
    if owner is None or OwnSetattr.is_putting or given is owner.sharded:
        return None
    unit = owner.unit()
    if unit is None or unit.group.is_in_other_form or id(given) in unit.group.computing:
        return None
    unit.come_to_rest()
    if unit.group.is_registered:
        raise StateError(
            f"parameter {owner.name} of unit {unit.label} was assigned while the unit's unsharded parameters "
            "are in its modules; assign it between steps, after reshard() if unshard() was called"
        )
    other = owner_of(given)
    if other is not None and other is not owner:
        raise Parallel3dError(
            f"parameter {owner.name} of unit {unit.label} was assigned {named(other)}, which would tie "
            "the two; tie parameters before fully_shard, or copy the values by copy_() under no_grad()"
        )
    owner.take_values(given)
    return owner.sharded


# ``.data``. torch's is an alias with another version counter; that of an unsharded parameter has the same one
# here. ``param.data = tensor`` would change no more than a DTensor's metadata: the engine does it for a
# sharded Parameter, and refuses it for an unsharded one.


def _read_data(param: torch.Tensor) -> torch.Tensor | None:
    mark = unsharded_mark(param)
    return param.detach() if mark is not None and mark.is_freed else None


def _write_data(param: torch.Tensor, value: Any) -> bool:
    mark = unsharded_mark(param)
    owner = owner_of(param) if mark is None else mark.owner()
    if owner is None or (mark is None and owner.sharded is not param):
        return False
    if mark is None:
        owner.set_data(value)
    elif mark.is_freed or not param.is_set_to(value):  # else a ``param.data += ...`` that is done
        raise lost_write(owner.unit(), [owner.name])
    return True


# Errors of a backward, see ``unit.run_backward``.


def explain(error: RuntimeError, outputs: Sequence[Any]) -> str | None:
    """Returns a message for ``error``, raised by a backward of ``outputs``, if it is due to a unit's
    parameters (changed, freed, or used beside plain tensors); else None."""
    return _of_versions(error, outputs) or _of_recomputation(error) or explain_mixed(error)


def _of_versions(error: RuntimeError, outputs: Sequence[Any]) -> str | None:
    """Explains autograd's error that an unsharded parameter, saved for backward, was modified; or None.

    To find its unit, the version counters of one bucket after another are set to those of earlier forwards:
    the saved tensor can be read when it is that bucket's.
    """
    for node in () if isinstance(error, Parallel3dError) else _nodes_of(outputs):
        for read in saved_by(node):
            if _error_of(read) != str(error):
                continue
            for bucket in list(numbered_buckets.values()):
                found = bucket.versions.saved_as(partial(_error_of, read))
                if found:
                    return _read_while_free(bucket.unit)
                if found is not None:
                    return (
                        f"unit {bucket.unit}: parameters that its forward has computed with were changed "
                        "before the backward (an optimizer step, an in-place change), so that its gradient "
                        "can't be computed any more; call backward before the weights change"
                    )
    return None


def _error_of(read: Callable[[], Any]) -> str | None:
    try:
        read()
    except Exception as error:
        return str(error)
    return None


def _read_while_free(name: str) -> str:
    return (
        f"unit {name}: a backward reads parameters of the unit while they are freed. It reaches them "
        "through a tensor that the engine does not know of: one that the unit's forward neither returned nor "
        "left on an attribute of its modules (but, for example, in a global list). Return it from "
        "forward, or keep it on an attribute; with set_reshard_after_forward(False) and a single "
        "backward of the sum of all losses it may stay where it is"
    )


def _of_recomputation(error: BaseException) -> str | None:
    """Explains a "mixed Tensor and DTensor" error in a recomputation (activation checkpointing): a module of
    a unit ran while the unit was sharded, as the engine hooked no tensor of this graph. Else returns None."""
    if MIXED not in str(error):
        return None
    units = [unit for module in _modules_on_stack(error) for unit in _units_at_rest_in(module)]
    return _read_while_free(units[-1].label) if units else None


def explain_call(error: BaseException) -> str | None:
    """Returns a message for ``error``, in which a forward has ended: which module was called while its unit
    was sharded, which one was given a DTensor, or which buffers are on meta. None: none of these."""
    text = str(error)
    if isinstance(error, Parallel3dError) or ("meta" not in text and MIXED not in text):
        return None  # looking at frames leaves cycles: not for each error
    stack = list(_modules_on_stack(error))
    if "meta" in text:
        names = (
            [name for name, buffer in stack[0].named_buffers() if buffer.is_meta] if stack else []
        )
        return without_values(names, "are still on the meta device") if names else None
    running = set(map(id, stack))
    for unit in (unit for module in stack for unit in _units_at_rest_in(module)):
        if any(id(module) in running for module in unit.modules):
            continue  # its forward ran: it has ended since, by this error
        inside = {id(m): name for top in unit.modules for name, m in top.named_modules() if name}
        name = next((inside[id(module)] for module in stack if id(module) in inside), None)
        if name is not None:
            first, *rest = unit.label.split(".")
            block = ".".join([first, *("*" if part.isdigit() else part for part in rest)])
            return (
                f"{name} of unit {unit.label} was called outside the unit's forward, while the unit's "
                "parameters are sharded. It must be a unit of its own: "
                f'parallelize(..., units=["{block}", "{block}.{name}"]), or fully_shard of it before that of '
                "the module around it"
            )
    return _of_input(error) or explain_mixed(error)


def _of_input(error: BaseException) -> str | None:
    """Explains that a module with plain parameters was given a DTensor, as by ``PrepareModuleInput``."""
    paths: dict[int, str] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module):
            continue
        paths = paths or {id(m): name for name, m in module.named_modules()}
        given = (name for name in inspect.getargs(frame.f_code).args if name != "self")
        for name in given:
            value = frame.f_locals.get(name)
            # Where it came in: modules inside are given it, or what was computed from it.
            if isinstance(value, DTensor) and owner_of(value) is None:
                return (
                    f"{paths.get(id(module)) or 'the model'} ({type(module).__name__}) was given a DTensor "
                    f"as {name!r}, {value.placements} on {value.device_mesh}, but its parameters are plain: "
                    "give it value.to_local(), or where one of torch's styles made it, "
                    "PrepareModuleInput(..., use_local_output=True)"
                )
    return None


def without_values(buffers: Sequence[str], why: str) -> str:
    """Returns the error message for a forward that would read the ``buffers`` named; ``why``: their state."""
    shown = ", ".join(buffers[:8]) + (f" and {len(buffers) - 8} more" if len(buffers) > 8 else "")
    return (
        f"buffers {shown} {why}, without values. A state dict does not have non-persistent buffers (rotary "
        "tables, say), and to_empty does not compute them. Call parallel3d.materialize(model) instead of "
        "to_empty, before values are loaded, or parallel3d.checkpoint.load_hf; or fill them as the module's "
        "__init__ does"
    )


DDP_REFUSED = (
    "DistributedDataParallel was given a model that parallelize or fully_shard has made parallel, and that "
    "reduces its gradients itself: leave DistributedDataParallel out. Hugging Face's Trainer wraps each "
    "model in it: use parallel3d.integrations.transformers.Trainer instead; of another (trl's, your own), "
    "class MyTrainer(parallel3d.integrations.transformers.ParallelMixin, OtherTrainer)"
)


def _modules_on_stack(error: BaseException) -> Iterator[nn.Module]:
    """Yields the modules whose methods are on the traceback of ``error``, the outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module


def _units_at_rest_in(module: nn.Module) -> Iterator[Any]:
    """Yields, for each of the module's own parameters that is a sharded Parameter, its unit."""
    for param in module._parameters.values():
        owner = None if param is None else owner_of(param)
        unit = None if owner is None else owner.unit()
        if unit is not None:
            yield unit


def check_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises StateError if ``inputs`` of a backward of ``outputs`` are sharded Parameters whose unsharded
    ones are in its graph: the graph does not lead to the sharded ones."""
    owners = [owner_of(each) for each in inputs if isinstance(each, DTensor)]
    wanted = {id(owner) for owner in owners if owner is not None}
    if not wanted:
        return
    for found in _owners_in(outputs):
        if id(found) in wanted:
            unit = found.unit()
            label = "" if unit is None else unit.label
            raise StateError(
                f"a backward was given parameter {found.name} of unit {label} as one of its inputs. It is "
                "the sharded Parameter; the graph leads to the unsharded one, whose gradient is reduced over "
                "ranks only by a backward without inputs. Call backward() without inputs, with "
                "requires_grad_(False) before the forward on the parameters that are to get none"
            )


def _nodes_of(outputs: Iterable[Any]) -> Iterator[Any]:
    nodes = [getattr(t, "grad_fn", getattr(t, "node", None)) for t in outputs]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            yield node


def _owners_in(outputs: Iterable[Any]) -> Iterable[ShardedParam]:
    """Yields the ``ShardedParam`` of each unsharded parameter in the autograd graph of ``outputs``."""
    for node in _nodes_of(outputs):
        variable = getattr(node, "variable", None)
        unit = getattr(variable, WATCHED_BY, lambda: None)()
        for bucket in () if unit is None else unit.group.buckets:
            pairs = zip(bucket.params, bucket.precision.compute_params, strict=True)
            yield from (param for param, compute in pairs if compute is variable)
        for arrived in getattr(node, "arrivals", ()):
            bucket = arrived.bucket()
            if bucket is not None:
                yield from (bucket.params[index] for index in arrived.indices)


# Sharded parameters beside plain tensors, outside their unit's forward: torch does not compute with a DTensor
# beside these. A penalty on parameters, added to a loss, works. Other operators, optimizers' steps and
# ``load_state_dict`` end in an error that names the parameter; errors of functions that call nothing here get
# a note when they are printed.

MIXED = "mixed torch.Tensor and DTensor"
_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


def _operate(operator: Callable[..., Any], sharded: DTensor, other: torch.Tensor) -> Any:
    """Returns ``operator(sharded, other)``, of a DTensor and a plain tensor, which torch refuses.

    Allowed is a 0-dim DTensor that requires grad, such as a penalty on the parameters: it becomes a plain
    tensor of the whole value, and its gradient the mean over the ranks, like those of parameters. Otherwise
    raises StateError with an explanation.
    """
    if not sharded.ndim and sharded.requires_grad and torch.is_grad_enabled():
        return operator(_MeanGradient.apply(sharded.full_tensor(), sharded.device_mesh), other)
    try:
        return operator(sharded, other)
    except RuntimeError as error:
        message = explain_mixed(error, [sharded])
        if message is None:
            raise
        raise StateError(message) from error


def _refuse_write(operands: Sequence[Any]) -> None:
    """Raises StateError: an in-place operation on a plain tensor, ``operands[0]``, has DTensors too."""
    raise StateError(_message(operands, []))


class _MeanGradient(torch.autograd.Function):
    """The identity in forward; backward returns the mean of the gradients over the ranks of ``mesh``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sizes = ctx.mesh.shape
        placements = [Partial() if size > 1 else Replicate() for size in sizes]
        parts = DTensor.from_local(grads[0], ctx.mesh, placements, run_check=False)
        return parts.full_tensor() / prod(sizes), None


# What errors mean.


def explain_mixed(error: BaseException, operands: Iterable[Any] = ()) -> str | None:
    """Returns a message for ``error`` if it says that plain tensors and DTensors were mixed; else None. The
    parameter is looked for in ``operands``, then among the local variables on the stack."""
    if "`DTensor` parameters, which is incompatible with DDP" in str(error):
        return DDP_REFUSED  # accelerate's words, on GPUs
    if isinstance(error, Parallel3dError) or MIXED not in str(error):
        return None
    return _message(operands, list(traceback.walk_tb(error.__traceback__))[::-1])


def _message(operands: Iterable[Any], frames: list[tuple[FrameType, int]]) -> str:
    found = (*operands, *(value for frame, _ in frames for value in _tensors(frame.f_locals)))
    owner = next((o for each in found if (o := owner_of(each)) is not None), None)
    stack = [*frames, *traceback.walk_stack(sys._getframe())]
    lines = ((frame.f_code.co_filename, line) for frame, line in stack)
    where = next((f" ({f}:{line})" for f, line in lines if not f.startswith(_LIBRARIES)), "")
    what, root = "a sharded parameter, or what was computed from one,", ""
    if owner is None:  # a tied head around the line, say, holds the embedding
        selves = (frame.f_locals.get("self") for frame, _ in frames)
        module = next((each for each in selves if isinstance(each, nn.Module)), None)
        held = {_of_other_unit(param) for param in (module.parameters() if module else ())} - {None}
        owner = held.pop() if len(held) == 1 else None
    if owner is not None:
        what = f"{named(owner)} is sharded, a DTensor, and"
        unit = owner.unit()
        if (
            unit
            and _of_other_unit(owner.sharded)
            and any(f.f_code.co_name == "forward" for f, _ in frames)
        ):
            root = f', or leave its module in the root: parallelize(..., units=["!{unit.label}"])'
        if unit and (method := _method(unit.modules, stack)):
            root += f", or let its {method} gather as forward does: parallel3d.fsdp."
            root += f'register_fsdp_forward_method(model, "{method}")'
    return (
        f"{what} was used beside a plain tensor outside the unit's forward{where}. Use its whole value, "
        "param.full_tensor(), which all ranks must call; or give the other tensor its layout: "
        "torch.distributed.tensor.distribute_tensor(tensor, param.device_mesh, param.placements); or compute "
        f"it in the unit's forward{root}. A penalty is added to a loss by loss = loss + penalty, not in place"
    )


def _method(modules: Sequence[nn.Module], stack: list[tuple[FrameType, int]]) -> str | None:
    """Returns the name of the method of one of ``modules``, other than forward, that is running; or None."""
    for frame, _ in stack:
        name, module = frame.f_code.co_name, frame.f_locals.get("self")
        own = any(module is each for each in modules) and not hasattr(nn.Module, name)
        if own and callable(getattr(module, name, None)):
            return name
    return None


def _of_other_unit(param: nn.Parameter) -> ShardedParam | None:
    """Returns the ``ShardedParam`` of ``param`` if it is in a unit of one module that is not the root."""
    owner = owner_of(param) if isinstance(param, DTensor) else None
    unit = None if owner is None else owner.unit()
    return None if unit is None or unit.is_root or len(unit.modules) > 1 else owner


def _tensors(values: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in values.values():
        items = value if isinstance(value, (list, tuple)) else [value]
        yield from (each for each in items if isinstance(each, torch.Tensor))


def _explain_step(optimizer: Optimizer, error: RuntimeError) -> str | None:
    """Returns a message for ``error`` of ``optimizer.step()`` if a sharded parameter is its cause."""
    if isinstance(error, Parallel3dError):
        return None
    for param, state in optimizer.state.items():
        owner = owner_of(param)
        if owner is None or not param.ndim:
            continue
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue
            start = f"{type(optimizer).__name__}: the state {key!r} of {named(owner)}"
            if not isinstance(value, DTensor):
                return (
                    f"{start} is a plain tensor, and the parameter is sharded: load whole states by "
                    "parallel3d.fsdp.load_optim_state_dict(model, optimizer, states), or a checkpoint by "
                    "parallel3d.checkpoint.load"
                )
            if "dtype" in str(error) and value.dtype != param.dtype:
                return (
                    f"{start} is {value.dtype}, and the parameter is now {param.dtype}: convert the model "
                    "(.float(), .to(dtype)) before the optimizer's first step, or make the optimizer anew"
                )
    return explain_mixed(error)


def explain_load(model: nn.Module, given: Mapping[str, Any], error: RuntimeError) -> str | None:
    """Returns a message for ``error`` of ``model.load_state_dict(given)`` if sharding is its cause."""
    problems: dict[str, list[str]] = {}
    marks = (MIXED, "size mismatch", "different meshes", "across different mesh")  # the last: 2.11
    if isinstance(error, Parallel3dError) or not any(mark in str(error) for mark in marks):
        return None
    for name, param in model.named_parameters():
        owner, value = owner_of(param), given.get(name)
        if owner is None or not isinstance(value, torch.Tensor):
            continue
        problem = _load_problem(owner, value)
        if problem is not None:
            text = f"{name} (shape {tuple(value.shape)}, the parameter's is {tuple(param.shape)})"
            problems.setdefault(problem, []).append(text)
    if not problems:
        return explain_mixed(error)
    if "FULL_STATE_DICT" in str(error):  # said already
        return None
    lines = (
        f"  - {first}" + (f" and {len(more)} more" if more else "") + f": {problem}"
        for problem, (first, *more) in problems.items()
    )
    return "the state dict does not fit the sharded model:\n" + "\n".join(lines)


def _load_problem(owner: ShardedParam, value: torch.Tensor) -> str | None:
    plain = not isinstance(value, DTensor)
    if plain and value.shape == owner.geometry.local_shape != owner.global_shape:
        return (
            "one rank's shard, as torch.save of local tensors writes it. Write checkpoints by "
            "parallel3d.checkpoint.save, or torch.save what parallel3d.fsdp.model_state_dict returns"
        )
    if value.shape != owner.global_shape:
        return (
            "another shape. Resize the plain model (resize_token_embeddings, of a vocabulary), before "
            "parallelize or fully_shard, then load; or give values of the parameter's shape"
        )
    if not isinstance(value, DTensor):
        return (
            "a plain tensor, and the parameter is sharded. Load whole values by "
            "parallel3d.fsdp.load_model_state_dict(model, state_dict)"
        )
    if value.device_mesh != owner.spec.mesh:
        return (
            f"of another mesh, {value.device_mesh}: what torch.save writes of DTensors fits the mesh it was "
            "written on. Use parallel3d.checkpoint.save and load, which reshard"
        )
    return None
