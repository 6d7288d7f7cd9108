"""The planner's predictions for a table of published runs: the columns of ``runs.csv`` and ``models.csv``.

python benchmarks/planner_runs.py RUNS.csv MODELS.csv PREDICTIONS.csv
"""

from __future__ import annotations

import csv
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from math import gcd
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster, gpus
from parallel3d.planner.decoder import spec_from_shapes
from parallel3d.planner.hf_config import known_models, spec_from_hf_config
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.stacks import stacks
from parallel3d.planner.uncertainty import memory_interval
from parallel3d.planner.workload import Workload

COLUMNS = (
    *("id", "tokens_per_s_per_gpu", "memory_gib", "memory_upper_gib", "fits"),
    *("tokens_per_s_per_gpu_low", "tokens_per_s_per_gpu_high", "memory_gib_low", "memory_gib_high"),
    *("fits_probability", "stack"),
)
_GIB = 2**30
_SHAPES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")

Row = Mapping[str, str]

# Words of the cells -> values of ``Workload``; other words are the values themselves.
_ATTENTION = {
    "unknown": None,
    "sdpa": None,
    "flash": None,
    "te": "cudnn",
    "flex": "triton",
    "xformers": "flash1",
    "math": "naive",
    "eager": "naive",
}
_CHECKPOINTING = {
    "selective": "selective_op",
    "selective_attention": "none",  # attention alone is made again, which flash kernels do anyway
    "off": "none",
}
_SHARDING = {"hsdp": "fsdp", "zero3": "fsdp", "zero0": "ddp", "distributed_optimizer": "zero1"}
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")


class Models(dict[str, Row]):
    """Rows of models.csv by name."""

    def spec(self, name: str, seq_len: int) -> ModelSpec:
        """The model of this name, or of ``known_models``; learned positions have ``seq_len`` rows.

        Raises:
            PlanningError: there is none.
        """
        if name not in self and name in known_models():
            return spec_from_hf_config(name)
        if name not in self:
            raise PlanningError(f"there is no model {name!r}; models are {', '.join(self)}")
        row = self[name]
        sizes: dict[str, Any] = {size: int(row[size]) for size in _SHAPES}
        kinds: dict[str, Any] = {k: row[k] for k in ("mlp", "positions", "norm") if row.get(k)}
        return spec_from_shapes(
            **sizes,
            **kinds,
            bias=_flag(row, "bias", False),
            tied=_flag(row, "tied", False),
            seq_len=seq_len,
            name=row["model"],
            source="models.csv",
        )


def read_models(path: str | PathLike[str]) -> Models:
    """The models of a CSV file.

    Raises:
        PlanningError: the file can't be read, or has no column ``model``.
    """
    return Models({row["model"]: row for row in _rows(path, "model")})


def _rows(path: str | PathLike[str], *needed: str) -> list[dict[str, str]]:
    """The rows of a CSV file with the columns ``needed``; cells without the spaces around them."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = [
                {k: (v or "").strip() for k, v in row.items() if k is not None}
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanningError(f"{path} can't be read: {error}") from error
    for name in needed:
        if rows and name not in rows[0]:
            raise PlanningError(f"{path} has no column {name!r}; it has {', '.join(rows[0])}")
    return rows


def predict_run(row: Row, models: Models) -> Prediction:
    """The prediction of one row, whose cells may be of upper or lower case. A blank cell gets its default:

    1 for the size of an axis, but ``replicate`` is what ``gpu_count`` leaves; 8 GPUs a node; micro_batch 1,
    no accumulation; no checkpointing, no compile; the best kernel of the GPU for ``attention``, and the kind
    that the library chooses for ``cp_attention``; a fused norm;
    full resharding; no sequence or loss parallelism.
    The loss is fused where norms are, unless ``loss_parallel`` is blank. Gradients are reduced, and under
    ZeRO-1 kept, as the notes say ("reduce bf16", "fp32 gradient reduce"); else in fp32 if that fits, else in
    bf16.

    Raises:
        PlanningError: a cell that can't be read; the message names the row.
    """
    name, model_name = row.get("id", "?"), row.get("model", "")
    row = {key: value.strip().lower() for key, value in row.items() if isinstance(value, str)}
    try:
        layout = _layout(row)
        work, cluster = _workload(row, layout), _cluster(row, layout.world_size)
        model = models.spec(model_name.strip(), work.seq_len)
        prediction = predict(model, layout, cluster, work)
        if not prediction.fits and _reduce_dtype(row) is None:
            prediction = predict(model, layout, cluster, replace(work, reduce_dtype="bf16"))
        return prediction
    except KeyError as error:
        raise PlanningError(f"run {name}: there is no column {error}") from error
    except (ValueError, ArithmeticError) as error:
        raise PlanningError(f"run {name}: {error}") from error


def _layout(row: Row) -> MeshLayout:
    shard, cp, tp = (_int(row, axis, 1) for axis in ("shard", "cp", "tp"))
    count, copy = _int(row, "gpu_count", 0), shard * cp * tp
    names = "shard * cp * tp" if cp > 1 else "shard * tp"
    if count % copy:
        raise PlanningError(f"gpu_count is {count}; it must be a multiple of {names}, {copy}")
    replicate = _int(row, "replicate", count // copy or 1)
    if count and replicate * copy != count:
        raise PlanningError(f"gpu_count is {count}, but replicate * {names} is {replicate * copy}")
    if _word(row, "sharding", "fsdp", _SHARDING) != "fsdp":
        # Only the optimizer's state is sharded, over all data ranks.
        replicate, shard = replicate * shard, 1
    return MeshLayout(replicate, shard, tp, cp=cp, ep=_int(row, "ep", 1))


def _cluster(row: Row, world: int) -> Cluster:
    # If the last node isn't full: nodes that are.
    node = gcd(world, min(_int(row, "gpus_per_node", min(8, world)), world))
    return Cluster.of(_gpu_name(row["gpu"]), world // node, node)


def _gpu_name(name: str) -> str:
    """Of a GPU that is not in the table: the one of its family with most of its name's words."""
    known = gpus()
    words = set(name.replace("_", "-").split("-"))
    family = name.partition("-")[0]
    near = [each for each in known if each.partition("-")[0] == family]
    if name in known or not near:
        return name
    return max(near, key=lambda each: (len(words & set(each.split("-"))), "sxm" in each))


def _workload(row: Row, layout: MeshLayout) -> Workload:
    fused = _flag(row, "fused_norm", True)
    micro = _int(row, "micro_batch", 1)
    return Workload(
        seq_len=_int(row, "seq_len", 2048),
        micro_batch=micro,
        global_batch=micro * layout.data_size * _int(row, "grad_accum", 1),
        precision=_word(row, "precision", "bf16", {"float8": "bf16", "fp8": "bf16"}),
        float8=row.get("precision") in ("float8", "fp8"),
        param_dtype=row.get("param_dtype") or "fp32",
        optimizer=row.get("optimizer") or "adamw",
        checkpointing=_word(row, "activation_checkpoint", "none", _CHECKPOINTING),
        compile=_flag(row, "compile", False),
        attention=_word(row, "attention", "unknown", _ATTENTION),
        cp_attention=row.get("cp_attention") or "auto",
        fused_norm=fused,
        fused_loss=fused and bool(row.get("loss_parallel")),
        chunked_loss=_flag(row, "chunked_loss", False),
        sequence_parallel=_flag(row, "sequence_parallel", False),
        loss_parallel=_flag(row, "loss_parallel", False),
        reshard_after_forward=_flag(row, "reshard_after_forward", True),
        sharding=_word(row, "sharding", "fsdp", _SHARDING),
        reduce_dtype=_reduce_dtype(row) or "fp32",
        stack=stack_of_run(row),
    )


def _reduce_dtype(row: Row) -> str | None:
    """What the notes say of the dtype of gradients in reductions."""
    found = re.search(
        r"reduce (bf16|fp32)|(bf16|fp32) (?:gradient )?reduc", row.get("notes", "").lower()
    )
    return (found[1] or found[2]) if found else None


def stack_of_run(row: Row) -> str:
    """The stack of a row: by ``stack``, or by words of its source, else of its notes, else by what it shards.

    A source of several softwares is told apart by ``compile``: the first stack of its words that compiles, or
    doesn't, as the row does.
    """
    if row.get("stack"):
        return row["stack"]
    known = {name: stack for name, stack in stacks().items() if stack.words}
    for cell in (row.get("source", ""), row.get("notes", "")):
        found = [n for n, s in known.items() if any(word in cell.lower() for word in s.words)]
        compiled = [n for n in found if ("compiled" in n) == _flag(row, "compile", False)]
        if found:
            return (compiled or found)[0]
    return "pytorch" if _word(row, "sharding", "fsdp", _SHARDING) == "fsdp" else "megatron"


def _word(row: Row, name: str, default: str, values: Mapping[str, Any]) -> Any:
    word = row.get(name) or default
    return values.get(word, word)


def _int(row: Row, name: str, default: int) -> int:
    text = row.get(name)
    if not text:
        return default
    value = float(text)
    if value != int(value) or value < 1:
        raise PlanningError(f"{name} is {text!r}; it must be an int, 1 or more")
    return int(value)


def _flag(row: Row, name: str, default: bool) -> bool:
    text = (row.get(name) or "").strip().lower()
    if text not in ("", *_YES, *_NO):
        raise PlanningError(f"{name} is {text!r}; it must be 0 or 1")
    return text in _YES if text else default


def predict_runs(rows: Iterable[Row], models: Models) -> list[dict[str, str]]:
    """A row of ``COLUMNS`` for each; ``memory_gib`` is that of the row's ``memory_kind``, reserved if blank.

    For a row that can't be read there is a warning, and blank cells.
    """
    predicted = []
    for row in rows:
        cells = [row.get("id", "")]
        try:
            cells += cells_of(row, predict_run(row, models))
        except PlanningError as error:
            warnings.warn(str(error), stacklevel=2)
        predicted.append(dict(zip_longest(COLUMNS, cells, fillvalue="")))
    return predicted


def cells_of(row: Row, prediction: Prediction) -> list[str]:
    """The cells of ``COLUMNS`` after the first, for the prediction of ``row``."""
    memory, kind = prediction.memory, (row.get("memory_kind") or "").strip().lower()
    shown = memory.allocated if kind in ("allocated", "peak_active") else memory.reserved
    sizes = [f"{size / _GIB:.3f}" for size in (shown, memory.upper, *memory_interval(shown))]
    speeds = prediction.tokens_per_second_per_gpu, *prediction.speed_interval
    speed, *ends = (f"{each:.2f}" for each in speeds)
    probability = f"{prediction.fits_probability:.3f}"
    verdict = str(int(prediction.fits))
    name = prediction.workload.profile.name
    return [speed, *sizes[:2], verdict, *ends, *sizes[2:], probability, name]


def write_predictions(
    runs: str | PathLike[str], models: str | PathLike[str], out: str | PathLike[str]
) -> int:
    """Reads both files, writes the predictions, returns how many there are."""
    predicted = predict_runs(_rows(runs, "id", "model", "gpu"), read_models(models))
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(predicted)
    return len(predicted)


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) != 3:
        sys.exit(__doc__)
    print(f"{write_predictions(*given)} predictions in {given[2]}")
