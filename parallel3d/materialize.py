"""materialize: initializes a model built on the meta device, with the same weights on every mesh.

One module at a time is made whole, initialized by its own method under a random generator seeded by
(seed, module name), and reduced to this rank's shard: the weights depend on the seed and the names alone,
and peak memory is the shards plus one module.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import dtensor_shard_box, make_dtensor, spec_of
from parallel3d._util import dry_run
from parallel3d._util.storage import fill_unset, unset_in
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.inspect import ShardedParam, class_name, unit_of
from parallel3d.mesh.failures import tells_others
from parallel3d.tp.lora import adapter_kind, check_can_initialise_adapters, initialise_adapter


@tells_others
def materialize(
    model: nn.Module, *, device: torch.device | str | None = None, seed: int = 0
) -> nn.Module:
    """Initializes every parameter and buffer of ``model`` that is on meta.

    A module with parameters or buffers of its own is initialized by ``model._init_weights(module)`` if the
    model has that method (Hugging Face's convention), and by ``module.reset_parameters()`` if it has not, or
    leaves some of the module's values out; adapters of peft's LoRA layers as peft does, and
    ``nn.MultiheadAttention``, which has neither, as torch does. A parameter that
    several modules share gets the values of the first. What a module's ``__init__`` computes or sets beside
    these methods is lost on meta.

    Args:
        model: plain or parallel.
        device: the target device; by default the mesh's device, or for a plain model the current accelerator
            or the CPU.
        seed: the same seed gives the same weights on every mesh and on the plain model.

    Returns:
        ``model`` itself.

    Raises:
        Parallel3dError: nothing is on meta, or a module has no method to initialize itself, or none that
            sets all its values; the model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise Parallel3dError(f"materialize was given {model!r}; it needs an nn.Module")
    target = _target_device(model, device)
    modules = [(name, module) for name, module in model.named_modules() if _on_meta(name, module)]
    if not modules:
        raise Parallel3dError(
            "materialize: no parameter or buffer of the model is on the meta device; build the model "
            "under torch.device('meta') first"
        )
    check_can_initialise(model, modules)
    # Not in inference mode: parameters made there could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        work = _Materialization(model, target, seed)
        for name, module in modules:
            work.initialise(name, module)
    return model


def give_memory(model: nn.Module, initialised: Sequence[tuple[str, nn.Module]]) -> None:
    """Allocates parameters and buffers that are on meta, uninitialized, for a model whose values come from
    elsewhere.

    Args:
        initialised: (name, module) of those that are also initialized, as by ``materialize`` with seed 0;
            their parameters that were not on meta are overwritten.
    """
    target = _target_device(model, None)
    work = _Materialization(model, target, seed=0)
    for name, module in initialised:
        work.initialise(name, module)
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                empty = torch.empty_like(param.detach(), device=target)
                real = nn.Parameter(empty, requires_grad=param.requires_grad)
                module._parameters[key] = work.plain.setdefault(id(param), real)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=target)


def _target_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    meshes = {unit.device_type for module in model.modules() if (unit := unit_of(module))}
    meshes |= {p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)}
    if device is not None:
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise Parallel3dError(
                f"materialize: device is {device!r}; it must be a device such as 'cpu' or 'cuda'"
            ) from error
        if target.type != "meta" and meshes - {target.type}:
            raise Parallel3dError(
                f"materialize: device is {target}, but the model's mesh is on {min(meshes)}; leave "
                "device out to use the mesh's"
            )
    elif meshes:
        target = torch.device(min(meshes))
    else:
        target = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if target.type == "meta":
        raise Parallel3dError("materialize: device is meta; give a device that holds values")
    return target


def _on_meta(name: str, module: nn.Module) -> list[str]:
    """Returns the names of the module's own parameters and buffers on meta."""
    own = [*module._parameters.items(), *module._buffers.items()]
    keys = [key for key, tensor in own if tensor is not None and tensor.is_meta]
    return [f"{name}.{key}" if name else key for key in keys]


def check_can_initialise(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises Parallel3dError unless each of ``modules`` (name, module) has a method to initialize itself."""
    check_can_initialise_adapters(model, [name for name, _ in modules])
    lacking: dict[str, list[str]] = {}  # class -> names of tensors, the first module's first
    tried: dict[type, bool] = {}  # whether the model's method leaves something out
    for name, module in modules:
        if _own_reset(module) is not None or adapter_kind(model, name):
            continue
        if hasattr(model, "_init_weights"):
            if type(module) not in tried:
                tried[type(module)] = _leaves_out(model, module)
            if not tried[type(module)]:
                continue
        lacking.setdefault(class_name(module), []).extend(_on_meta(name, module))
    if not lacking:
        return
    shown = "; ".join(
        f"{', '.join(names[:2])}{', ...' * (len(names) > 2)} ({cls})"
        for cls, names in lacking.items()
    )
    found = "finds no method that initialises"
    if hasattr(model, "_init_weights"):
        found = f"calls {class_name(model)}._init_weights, which leaves out"
    raise Parallel3dError(
        f"materialize {found} {shown}. Give {', '.join(lacking)} a method "
        "reset_parameters() that fills a module's own parameters and buffers (__init__ can call it), or "
        "the model a method _init_weights(module). Or build the model with values instead: without "
        "torch.device('meta') and materialize, after the same torch.manual_seed(seed) on all ranks"
    )


_OutProj = nn.modules.linear.NonDynamicallyQuantizableLinear  # only nn.MultiheadAttention has it
_IN_ATTENTION = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_IN_ATTENTION |= {"in_proj_bias", "bias_k", "bias_v"}


def _own_reset(module: Any) -> Callable[[], object] | None:
    """Returns the function that initializes the module's own parameters: ``reset_parameters``, or ours for
    ``nn.MultiheadAttention``; None if there is none."""
    if isinstance(module, _OutProj):
        return functools.partial(_reset_attention, module)
    if hasattr(module, "reset_parameters"):
        return module.reset_parameters
    if isinstance(module, nn.MultiheadAttention) and module._parameters.keys() <= _IN_ATTENTION:
        return functools.partial(_reset_attention, module)
    return None


def _reset_attention(module: nn.Module) -> None:
    """Initializes ``nn.MultiheadAttention``, or its output layer, as its ``__init__`` does."""
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    for name, param in module._parameters.items():
        if param is None or name == "weight":  # the output layer's
            continue
        if name.endswith("bias"):
            nn.init.zeros_(param)
        elif name in ("bias_k", "bias_v"):
            nn.init.xavier_normal_(param)
        else:
            nn.init.xavier_uniform_(param)


def _leaves_out(model: Any, module: nn.Module) -> bool:
    """Whether ``model._init_weights(module)`` would leave values of ``module`` unset; tries it on the CPU."""
    if dry_run.active():  # there are no values
        return False
    before = dict(module._parameters), dict(module._buffers)
    try:
        own: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in own:
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    empty = fill_unset(torch.empty_like(local, device="cpu"))
                    is_param = isinstance(tensor, nn.Parameter)
                    tensors[key] = nn.Parameter(empty, requires_grad=False) if is_param else empty
        with _seeded("trial", torch.device("cpu")), torch.no_grad():
            model._init_weights(module)
        return _is_unset(module)
    finally:
        module._parameters.update(before[0])
        module._buffers.update(before[1])


def _is_unset(module: nn.Module) -> bool:
    """Whether a tensor of the module itself still has values that nobody has set since ``fill_unset``."""
    own = (*module._parameters.values(), *module._buffers.values())
    tensors = (t for t in own if t is not None and not t.is_meta and t.dtype != torch.bool)
    return any(bool(unset_in(tensor).any()) for tensor in tensors)


class _Materialization:
    """One call of ``materialize``: allocates the units' buffers, initializes one module at a time, keeps this
    rank's shards."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self.model = model
        self.device = device
        self.seed = seed
        # Id of a sharded Parameter -> (its local view, the parameter).
        self.shards: dict[int, tuple[torch.Tensor, ShardedParam]] = {}
        for unit in dict.fromkeys(filter(None, map(unit_of, model.modules()))):
            for bucket in unit.group.buckets:
                if bucket.flat.device.type == "meta":
                    bucket.build(device)
                for param, view in zip(bucket.params, bucket.local_views, strict=True):
                    self.shards[id(param.sharded)] = (view, param)
            unit.group.refresh()
        # Whether it can be seen which values the model's ``_init_weights`` leaves out.
        self.marks_unset = hasattr(model, "_init_weights") and not dry_run.active()
        self.done: set[int] = set()  # ids of sharded Parameters that have their values
        self.plain: dict[int, nn.Parameter] = {}  # id of a meta Parameter -> the one in its place

    def _set_the_rest(self, name: str, module: Any) -> None:
        """Calls the module's own ``reset_parameters``, because ``_init_weights`` has left values unset;
        Parallel3dError if some still are."""
        if (reset := _own_reset(module)) is not None:
            reset()
        if _is_unset(module):
            raise Parallel3dError(
                f"materialize: {class_name(self.model)}._init_weights leaves out values of {name!r} "
                f"({class_name(module)}), and no reset_parameters() sets them; build the model anew"
            )

    def initialise(self, name: str, module: nn.Module) -> None:
        """Initializes the module's own parameters and buffers as whole tensors; keeps the shards."""
        before = dict(module._parameters)
        try:
            for key, param in before.items():
                if param is not None:
                    empty = torch.empty(param.shape, dtype=param.dtype, device=self.device)
                    if self.marks_unset:
                        fill_unset(empty)
                    module._parameters[key] = nn.Parameter(empty, requires_grad=param.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.empty_like(buffer, device=self.device)
                    if self.marks_unset:
                        fill_unset(module._buffers[key])  # type: ignore[arg-type]
            with _seeded(f"{self.seed}:{name}", self.device), torch.no_grad():
                if initialise_adapter(self.model, name, module):
                    pass  # peft's models have the _init_weights of the model inside
                elif hasattr(self.model, "_init_weights"):
                    self.model._init_weights(module)  # type: ignore[operator]
                    if self.marks_unset and _is_unset(module):
                        self._set_the_rest(name, module)
                elif (reset := _own_reset(module)) is not None:
                    reset()
                wholes = dict(module._parameters)
                for key, param in before.items():
                    if id(param) in self.shards and id(param) not in self.done:
                        view, sharded = self.shards[id(param)]
                        whole = wholes[key]
                        assert whole is not None
                        view.copy_(sharded.shard_of(whole.detach(), tp_local=False))
                        self.done.add(id(param))
        finally:
            module._parameters.update(before)
        for key, param in before.items():
            real = wholes[key]
            if param is not None and param.is_meta and real is not None:
                if isinstance(param, DTensor) and id(param) not in self.shards:
                    real = _shard_of(real, param)
                module._parameters[key] = self.plain.setdefault(id(param), real)


def _shard_of(whole: torch.Tensor, param: DTensor) -> nn.Parameter:
    """Returns this rank's shard of ``whole``, placed as ``param``, a DTensor of torch's ``fully_shard``."""
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shape, offset = dtensor_shard_box(whole.shape, mesh.shape, coordinate, param.placements)
    box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    shard = make_dtensor(whole.detach()[box].clone(), spec_of(param))
    return nn.Parameter(shard, requires_grad=param.requires_grad)


@contextmanager
def _seeded(text: str, device: torch.device) -> Iterator[None]:
    """A context in which the default generators are seeded from ``text``; it restores their states."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield
