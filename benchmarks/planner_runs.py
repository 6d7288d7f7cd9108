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
from parallel3d.planner.kernels import attention_kernel
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.pipeline import Pipeline
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.uncertainty import residuals
from parallel3d.planner.workload import Workload

COLUMNS = (
    *("id", "tokens_per_s_per_gpu", "memory_gib", "memory_upper_gib", "fits"),
    *("tokens_per_s_per_gpu_low", "tokens_per_s_per_gpu_high", "memory_gib_low", "memory_gib_high"),
    *("fits_probability", "stack", "assumed"),
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
    "fa2": "flash2",
    "flash_attention_2": "flash2",
    "fa3": "flash3",
}
_OPTIMIZERS = {
    "fused_adamw": "adamw",
    "adamw_fused": "adamw",
    "decoupled_adamw": "adamw",
    "adamw8bit": "adamw_8bit",
    "lion": "sgd_momentum",  # one moment, as Muon
    "muon": "sgd_momentum",
}
_CHECKPOINTING = {
    "selective": "selective_op",
    "selective_attention": "none",  # attention alone is made again, which flash kernels do anyway
    "off": "none",
    "false": "none",
}
_SHARDING = {
    "hsdp": "fsdp",
    "zero3": "fsdp",
    "zero2": "zero1",  # whose gradients are sharded as well
    "zero0": "ddp",
    "none": "ddp",
    "distributed_optimizer": "zero1",
}
_SCALINGS = {"rowwise": "rowwise", "mxfp8": "blockwise"}
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
            experts=_int(row, "experts", 0),
            experts_per_token=_int(row, "experts_per_token", 0),
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

    1 for cp, tp and ep; ``shard`` is what ``gpu_count`` leaves of a run that shards its parameters, else
    ``replicate``; 8 GPUs a node; a micro-batch is what ``global_batch`` and ``grad_accum`` leave; no
    checkpointing, no compile; the best kernel of the GPU for ``attention``, and the kind that the stack takes
    for ``cp_attention``; a fused norm; full resharding; no sequence or loss parallelism.
    The loss is fused where ``fused_norm`` is 1 and ``loss_parallel`` is given. Gradients are reduced, and
    under ZeRO-1 kept, as the notes say ("reduce bf16", "fp32 gradient reduce"); else in fp32 if that fits,
    else in bf16. ``assumptions`` names what was derived or taken.

    Raises:
        PlanningError: a cell that can't be read; the message names the row.
    """
    name, model_name = row.get("id", "?"), row.get("model", "")
    row = {key: value.strip().lower() for key, value in row.items() if isinstance(value, str)}
    try:
        layout = _layout(row)
        pipeline = _pipeline(row)
        work, cluster = _workload(row, layout), _cluster(row, layout.world_size * pipeline.stages)
        model = models.spec(model_name.strip(), work.seq_len)
        prediction = predict(model, layout, cluster, work, pipeline)
        if not prediction.fits and _reduce_dtype(row) is None:
            work = replace(work, reduce_dtype="bf16")
            prediction = predict(model, layout, cluster, work, pipeline)
        return prediction
    except KeyError as error:
        raise PlanningError(f"run {name}: there is no column {error}") from error
    except (ValueError, ArithmeticError) as error:
        raise PlanningError(f"run {name}: {error}") from error


def assumptions(row: Row, prediction: Prediction) -> str:
    """What ``prediction`` has for cells of ``row`` that are blank, in words; "": none is blank.

    Cells that say nothing of such a run (resharding without shards) are left out.
    """
    row = {key: value.strip().lower() for key, value in row.items() if isinstance(value, str)}
    layout, work = prediction.layout, prediction.workload
    taken = {
        "shard": layout.shard,
        "replicate": layout.replicate,
        "micro_batch": prediction.micro_batch,
        "ep": layout.ep if layout.ep > 1 else "",
        "seq_len": work.seq_len,
        "precision": work.precision,
        "param_dtype": work.param_dtype,
        "optimizer": work.optimizer,
        "activation_checkpoint": work.checkpointing,
        "attention": attention_kernel(prediction.cluster.gpu, work),
        "cp_attention": work.cp_attention if layout.cp > 1 else "",
        "reshard_after_forward": int(work.reshard_after_forward)
        if work.sharding == "fsdp" and layout.shard * layout.cp > 1
        else "",
        "loss_parallel": int(work.loss_parallel) if layout.tp > 1 else "",
        "fused_norm": int(work.fused_norm),
        "fused_loss": int(work.fused_loss),
        "stack": work.profile.name,
    }
    if layout.data_size > 1 and _reduce_dtype(row) is None:
        taken["reduce_dtype"] = work.reduce_dtype
    return "; ".join(
        f"{name} {value}" for name, value in taken.items() if value != "" and not row.get(name)
    )


def _layout(row: Row) -> MeshLayout:
    cp, tp, ep = _int(row, "cp", 1), _int(row, "tp", 1), _ep(row)
    count, sharding = _int(row, "gpu_count", 0) // _int(row, "pp", 1), _sharding(row)
    left = max(count // (cp * tp), 1)
    replicate = _int(row, "replicate", 0)  # 0: blank
    shard = _int(row, "shard", left // (replicate or 1) if sharding == "fsdp" else 1)
    replicate = replicate or max(left // shard, 1)
    if count and replicate * shard * cp * tp != count:
        names = "replicate * shard * cp * tp" if cp > 1 else "replicate * shard * tp"
        raise PlanningError(f"gpu_count is {count}, but {names} is {replicate * shard * cp * tp}")
    if sharding != "fsdp" and ep == 1:
        # Only the optimizer's state is sharded, over all data ranks; ep divides those of shard, too.
        replicate, shard = replicate * shard, 1
    return MeshLayout(replicate, shard, tp, cp=cp, ep=ep)


def _ep(row: Row) -> int:
    """The cell; where the table has no such column what the notes say ("EP 8")."""
    said = None if "ep" in row else re.search(r"\bep (\d+)", row.get("notes", "").lower())
    return int(said[1]) if said else _int(row, "ep", 1)


def _sharding(row: Row) -> str:
    """The cell, unless the notes say that it stands for a distributed optimizer ("no FSDP")."""
    if "no fsdp" in row.get("notes", "").lower():
        return "zero1"
    return str(_word(row, "sharding", "fsdp", _SHARDING))


def _pipeline(row: Row) -> Pipeline:
    virtual = _int(row, "virtual", 1)
    usual = "interleaved" if virtual > 1 else "1f1b"
    return Pipeline(_int(row, "pp", 1), row.get("schedule") or usual, virtual)


def _micro_batch(row: Row, layout: MeshLayout) -> int:
    """The cell, or what a step's sequences leave for a rank and micro-batch."""
    ranks = layout.data_size * _int(row, "grad_accum", 1)
    return _int(row, "micro_batch", max(_int(row, "global_batch", ranks) // ranks, 1))


def _cluster(row: Row, world: int) -> Cluster:
    # If the last node isn't full: nodes that are.
    node = gcd(world, min(_int(row, "gpus_per_node", min(8, world)), world))
    said = re.search(r"([\d.]+) gb/s a gpu", row.get("notes", ""))
    nic = float(row.get("nic") or (said[1] if said else 0)) or None
    return Cluster.of(_gpu_name(row["gpu"]), world // node, node, nic)


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
    micro, precision = _micro_batch(row, layout), row.get("precision", "")
    float8 = precision.startswith(("fp8", "float8", "mxfp8"))
    told = precision + row.get("notes", "").lower()
    return Workload(
        seq_len=_int(row, "seq_len", 2048),
        micro_batch=micro,
        global_batch=micro * layout.data_size * _int(row, "grad_accum", 1),
        precision="bf16" if float8 else row.get("precision") or "bf16",
        float8=float8,
        float8_scaling=next(
            (kind for word, kind in _SCALINGS.items() if float8 and word in told), "tensorwise"
        ),
        param_dtype=row.get("param_dtype") or "fp32",
        optimizer=_word(row, "optimizer", "adamw", _OPTIMIZERS),
        checkpointing=_word(row, "activation_checkpoint", "none", _CHECKPOINTING),
        compile=_flag(row, "compile", False),
        attention=_word(row, "attention", "unknown", _ATTENTION),
        cp_attention=row.get("cp_attention") or "auto",
        fused_norm=_flag(row, "fused_norm", True),
        fused_loss=_flag(row, "fused_norm", False) and bool(row.get("loss_parallel")),
        fp32_logits=_flag(row, "fp32_logits", True),
        tiled_mlp=_flag(row, "tiled_mlp", False),
        chunked_loss=_flag(row, "chunked_loss", False),
        sequence_parallel=_flag(row, "sequence_parallel", False),
        loss_parallel=_flag(row, "loss_parallel", False),
        reshard_after_forward=_flag(row, "reshard_after_forward", True),
        no_sync=_flag(row, "no_sync", False),
        sharding=_sharding(row),
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
    """The stack of a row: its cell, else by the software that its notes name, else by what it shards.

    A source's name says nothing: a repository's runs may be of any software.
    """
    if row.get("stack"):
        return row["stack"]
    notes, compiles = row.get("notes", "").lower(), _flag(row, "compile", False)
    for word, (before, now) in _SOFTWARE.items():
        if word in notes:
            name = before if _is_old(row) else now
            return "fsdp1-compiled-2024" if name == "fsdp1-2023" and compiles else name
    return "pytorch" if _sharding(row) == "fsdp" else "megatron"


def _is_old(row: Row) -> bool:
    """Whether the software is of before 2025, by what is said of its version, else by the page's date."""
    if version := re.search(r"torch 2\.(\d+)|torch (1)\.", row.get("notes", "").lower()):
        return int(version[1] or 0) < 7
    dated = re.search(r"(?<!\d)20([12]\d)(?!\d{3,})|arxiv:(\d\d)\d\d\.", _dates(row))
    return dated is not None and int(dated[1] or dated[2]) < 25


def _dates(row: Row) -> str:
    return f"{row.get('notes', '')} {row.get('source', '')}".lower()


# A word of the notes -> the stack, before 2025 and since.
_SOFTWARE = {
    "async tp": ("fsdp2-async-tp", "fsdp2-async-tp"),
    "async tensor parallel": ("fsdp2-async-tp", "fsdp2-async-tp"),
    "fsdp1": ("fsdp1-2023", "fsdp1-2023"),
    "fsdp2": ("fsdp2-2024", "fsdp2-2025"),
    "fully_shard": ("fsdp2-2024", "fsdp2-2025"),
    "nanotron": ("nanotron", "nanotron"),
    "nemo": ("nemo-te", "nemo-te"),
    "transformerengine": ("megatron-te", "megatron-te"),
    "megatron": ("megatron-2023", "megatron-te"),
}


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
            prediction = predict_run(row, models)
            cells += [*cells_of(row, prediction), assumptions(row, prediction)]
        except PlanningError as error:
            warnings.warn(str(error), stacklevel=2)
        predicted.append(dict(zip_longest(COLUMNS, cells, fillvalue="")))
    return predicted


def cells_of(row: Row, prediction: Prediction) -> list[str]:
    """The cells of ``COLUMNS`` between the first and the last, for the prediction of ``row``."""
    memory, kind = prediction.memory, (row.get("memory_kind") or "").strip().lower()
    shown = memory.allocated if kind in ("allocated", "peak_active") else memory.reserved
    sizes = [
        f"{size / _GIB:.3f}" for size in (shown, memory.upper, *residuals().memory.around(shown))
    ]
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
