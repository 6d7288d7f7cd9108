"""What TRL's DPOTrainer does to a parallel model before it trains: an adapter for the reference, and a hash.

To a model with adapters it adds one named ``ref``, whose values it copies from ``default``. For log-probs
that are computed before the training it names a file by a hash of all weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from parallel3d.errors import Parallel3dError
from parallel3d.fsdp import FSDPModule
from parallel3d.fsdp.inspect import note_ignored, unit_of
from parallel3d.tp.lora import is_peft_model


@contextmanager
def as_trl_expects(given: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """A context for the ``__init__`` of a Trainer that is called with the arguments ``given``.

    Yields what is to be called once TRL has copied the values of an adapter: then each rank has it whole, in
    no unit, as plain parameters that nobody trains.

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
        """One that was there before ``parallelize`` stays. Parameters of a new one are DTensors until
        ``settle``, so that TRL can copy to them."""
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
        """A hash of all ranks' shards in place of the weights, which no rank has as a whole."""
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
