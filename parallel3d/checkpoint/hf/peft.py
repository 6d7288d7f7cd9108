"""save_peft, load_peft: adapters of the peft library, in the folders that plain peft writes and loads.

Which tensors an adapter has, and their names in its file, is found by running peft's own
``get_peft_model_state_dict`` on tensors without values.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parallel3d._util import dry_run
from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.hf import conversion as hf
from parallel3d.checkpoint.hf.layout import Layout, whole_of
from parallel3d.checkpoint.hf.load import TensorReader, check_fits, path_in, read_entries
from parallel3d.checkpoint.hf.save import OutFile, exchange
from parallel3d.checkpoint.ranks import Ranks, check_same, new_folder, ranks_of
from parallel3d.checkpoint.state import bring_to_rest
from parallel3d.errors import CheckpointError
from parallel3d.materialize import give_memory
from parallel3d.tp.lora import is_peft_model

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

Embeddings = bool | Literal["auto"]
"""As ``save_embedding_layers`` of peft's ``save_pretrained``."""
_COMPUTED_WITH = (
    *("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora"),
    "alora_invocation_tokens",
    *("alpha", "scaling", "randlora_alpha", "random_loc_seed"),  # LoHa, LoKr; FourierFT; RandLora
    *("coft", "eps", "use_cayley_neumann", "num_cayley_neumann_terms", "apply_GS"),  # OFT; HRA
)
"""What of a config changes what the same weights compute; names and shapes of weights show the rest."""


def save_peft(
    folder: str | os.PathLike[str], model: nn.Module, *, adapter_name: str = "default"
) -> None:
    """Writes an adapter of ``model`` as a folder that ``PeftModel.from_pretrained`` loads; every rank must
    call it.

    The first rank writes, one whole tensor at a time, from the parts that the others send. Everything is
    written into a temporary folder, which is renamed when it is complete.

    Args:
        folder: on a file system that all ranks share. It must be empty, not exist, or be an earlier folder of
            save_peft, which is replaced. It holds this one adapter: another one goes into another folder.
        model: what ``get_peft_model`` returned, plain or parallel, at rest.
        adapter_name: which of the model's adapters, with all that peft stores beside it: copies of
            ``modules_to_save``, biases, embeddings that have adapters.

    Raises:
        CheckpointError: on every rank, if the model is not peft's, has no such adapter, or values on meta, if
            the folder holds something else, or a rank can't write or doesn't see the others' folder. What was
            written is removed.
    """
    if dry_run.active():  # nothing is written
        return
    ranks, path = ranks_of(model, "save_peft"), Path(os.path.abspath(folder))
    stored = _begin(model, ranks, "save_peft", adapter_name, "auto")
    tensors = ranks.on_each(lambda: _tensors(model, stored))
    holder = nn.Module()  # has the tensors by their names in the file
    holder._buffers.update(tensors)
    export = hf.plan_export(holder, ranks, None, None, "save_peft")
    # One name for each tensor above; a tied one has more in the file.
    first: dict[int, str] = {}
    outputs = tuple(
        hf.OutTensor(name, whole_of(first.setdefault(id(t), name), tuple(t.shape)), t.dtype)
        for name, t in tensors.items()
    )
    header = files.header_of({out.name: (out.dtype, out.layout.shape) for out in outputs})
    file = OutFile(WEIGHTS, header, outputs)

    def is_ours(entry: Path) -> bool:
        return entry.name == CONFIG or (entry.name == WEIGHTS and files.is_ours(entry))

    with new_folder(ranks, path, is_ours) as temporary:
        ranks.all(lambda: exchange(export, [file], ranks, temporary))
        ranks.first(lambda: _write_config(model, adapter_name, temporary))


def load_peft(
    folder: str | os.PathLike[str], model: nn.Module, *, adapter_name: str = "default"
) -> None:
    """Loads the adapter that peft's ``save_pretrained``, or ``save_peft``, wrote in ``folder`` into one of
    ``model``'s, in place; every rank must call it.

    Each rank reads only what it holds. Values are cast to the model's dtypes.

    Args:
        folder: a local one with ``adapter_config.json`` and ``adapter_model.safetensors``.
        model: what ``get_peft_model`` returned, plain or parallel, at rest. Its adapter must be of the
            folder's kind, scaling and shapes.
        adapter_name: which of the model's adapters.

    Raises:
        CheckpointError: on every rank, if the folder holds no such adapter, or names, shapes, dtypes or
            scaling don't fit. The model is unchanged then; but if the file fails while it is read, a part may
            be loaded.
        CorruptCheckpointError: if the file is cut short or invalid.
    """
    if dry_run.active():  # nothing is read, but memory is allocated
        give_memory(model, ())
        return
    ranks, path = ranks_of(model, "load_peft"), Path(folder)
    needed = _begin(model, ranks, "load_peft", adapter_name, False)
    # Embeddings that have adapters, which peft stores unless it is told not to.
    allowed = _begin(model, ranks, "load_peft", adapter_name, True)
    stored = ranks.first(lambda: _stored(path, model, adapter_name))

    def plan(reader: TensorReader) -> tuple[list[hf.Entry], dict[str, Layout]]:
        unexpected = [name for name in stored if name not in allowed]
        missing = [name for name in needed if name not in stored]
        tensors = _tensors(model, {n: own for n, own in allowed.items() if n in stored})
        entries = [hf.Entry((name,), tensor) for name, tensor in tensors.items()]
        layouts = {entry.name: whole_of(entry.name, stored[entry.name].shape) for entry in entries}
        error = f"{path} doesn't fit the model's adapter {adapter_name!r}"
        by_entry = {name: [layout] for name, layout in layouts.items()}
        check_fits(error, entries, by_entry, stored, missing, unexpected)
        reader.check_files(list(layouts))
        return entries, layouts

    with TensorReader(path, stored) as reader:
        entries, layouts = ranks.on_each(lambda: plan(reader))
        ranks.all(lambda: read_entries(entries, layouts, reader))


def _begin(
    model: Any, ranks: Ranks, call: str, adapter_name: str, embeddings: Embeddings
) -> dict[str, str]:
    """Checks the model and its adapter; returns names in the adapter's file -> the model's. Collective."""

    def check() -> dict[str, str]:
        if not is_peft_model(model):
            raise CheckpointError(
                f"{call}: the model is a {hf.plain_class(model).__name__}, not one of peft's; give what "
                f"get_peft_model returned, or use {call.replace('peft', 'hf')}"
            )
        if adapter_name not in model.peft_config:
            raise CheckpointError(
                f"{call}: the model has no adapter {adapter_name!r}; it has {', '.join(model.peft_config)}"
            )
        bring_to_rest(model, call, meta_ok=True)
        return {"adapter_name": adapter_name}

    check_same(call, ranks.all(check))
    # On one rank, because peft may ask the hub.
    return ranks.first(lambda: _file_names(model, call, adapter_name, embeddings))


def _file_names(model: Any, call: str, adapter_name: str, embeddings: Embeddings) -> dict[str, str]:
    from peft import get_peft_model_state_dict

    without_values = {
        name: torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device="meta")
        for entry in hf.entries_of(model)
        for name in entry.names
    }
    own = {id(tensor): name for name, tensor in without_values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it stores embeddings, or found none
        chosen = get_peft_model_state_dict(
            model, without_values, adapter_name, save_embedding_layers=embeddings
        )
    made = [name for name, tensor in chosen.items() if id(tensor) not in own]
    if made or not chosen:
        kind = model.peft_config[adapter_name].peft_type.value
        what = f"stores {made[0]!r}, which is none of its tensors" if made else "stores nothing"
        raise CheckpointError(
            f"{call}: the adapter {adapter_name!r}, of peft's {kind}, {what}; a folder "
            'of peft can\'t be written or read. checkpoint.save(..., only="trainable") keeps its parameters'
        )
    return {name: own[id(tensor)] for name, tensor in chosen.items()}


def _tensors(model: nn.Module, stored: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the adapter's tensors by their names in the file; ``stored``: name there -> in the model."""
    own = {name: entry.tensor for entry in hf.entries_of(model) for name in entry.names}
    tensors = {}
    for name, own_name in sorted(stored.items()):
        if own_name not in own:
            raise CheckpointError(
                f"this rank's model has no {own_name!r}, which the first rank's has"
            )
        tensors[name] = tensor = own[own_name]
        if tensor.is_meta:
            raise CheckpointError(
                f"{own_name!r} is on meta and has no values; call materialize, or load_hf with the base "
                "model's folder, first"
            )
    return tensors


def _write_config(model: Any, adapter_name: str, folder: Path) -> None:
    """Writes ``adapter_config.json``, as peft does for a model that is not parallel."""
    config = copy.deepcopy(model.peft_config[adapter_name])
    config.inference_mode = True
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    cls = hf.plain_class(base)
    auto = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.save_pretrained(folder, auto_mapping_dict=auto if config.task_type is None else None)


def _stored(folder: Path, model: Any, adapter_name: str) -> dict[str, files.Stored]:
    """Returns where each tensor of the adapter in ``folder`` is stored, after checking the config there."""
    names = sorted(path.name for path in folder.iterdir())[:10] if folder.is_dir() else []
    if not {WEIGHTS, CONFIG} <= {*names}:
        raise CheckpointError(
            f"load_peft: {str(folder)!r} is not a local folder with {CONFIG} and {WEIGHTS}, which it reads; "
            f"it holds {', '.join(names) or 'nothing'}"
        )
    path = path_in(folder, CONFIG)
    with files.damaged_if(f"{path} is not a config of peft", (ValueError, KeyError, TypeError)):
        config = files.loads(files.read_json_object(path.resolve(), files.MAX_HEADER), "it")
    own = model.peft_config[adapter_name]
    for field in fields(own):
        if field.name not in _COMPUTED_WITH:
            continue
        factory = field.default_factory
        default = field.default if factory is MISSING else factory()
        # Without a key, as older versions of peft wrote it, peft takes the default.
        theirs, ours = config.get(field.name, default), getattr(own, field.name)
        if theirs != ours:
            raise CheckpointError(
                f"load_peft: {field.name} is {theirs!r} in {folder}, and {ours!r} in the model's adapter "
                f"{adapter_name!r}; make the adapter with PeftConfig.from_pretrained(folder)"
            )
    return files.read_header(path_in(folder, WEIGHTS), WEIGHTS)
