"""Makes model, cluster and workload of the options of the planner's commands; reports all
mistakes at once."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallel3d.errors import MistakesError, PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import Mistakes, check_choice, check_number, check_size
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.cluster import gpu as resolve_gpu
from parallel3d.planner.decoder import spec_from_shapes
from parallel3d.planner.hf_config import spec_from_hf_config
from parallel3d.planner.lora import with_lora
from parallel3d.planner.model_spec import Lora, ModelSpec
from parallel3d.planner.pipeline import Pipeline
from parallel3d.planner.stacks import OURS, read_stack_file
from parallel3d.planner.workload import CHECKPOINTING, Workload
from parallel3d.tools.cli import options as o
from parallel3d.tools.terminal import Busy

_ASKED = {
    "model": "which model? Give --model a name (llama-3.1-8b), a config.json, package.module:function or "
    "layers=32,hidden=4096,...",
    "gpu": "which GPU? Give --gpu a name, for example h100-80gb-sxm",
    "seq_len": "how long are the sequences? Give --seq-len, for example 4096",
}
_LENGTH, _LONGEST, _STEP = 4096, 8192, 2**22  # where no config says; of a config; tokens of a step
_TRIED = ("chunked_loss", "shard_optimizer_over_replicate")


def setup(options: Mapping[str, Any], *, several: bool) -> tuple[ModelSpec, Cluster, Workload, str]:
    """Returns (model, cluster, workload, a text that names the defaults in use) for a command's options.

    ``several``: the command tries several layouts, and the default is a global batch; else it is a
    micro-batch of 1. Mistakes raise a MistakesError before a model of the user's own is imported.
    """
    cluster = check_given(options)
    text, seq_len = options["model"], options["seq_len"]
    with Busy(f"reading {text}"):
        model = read_model(text, seq_len)
    chosen, said = {}, []
    if seq_len is None:
        chosen["seq_len"] = seq_len = min(model.seq_len or _LENGTH, _LONGEST)
        longest = f"the model takes {model.seq_len:,}" if model.seq_len else "no config says"
        said.append(f"--seq-len {seq_len} ({longest})")
    if options["micro_batch"] is None and options.get("global_batch") is None:
        if several:
            chosen["global_batch"] = batch = usual_batch(seq_len, cluster.world_size)
            said.append(f"--global-batch {batch} ({batch * seq_len / 1e6:.2f} M tokens a step)")
        else:
            chosen["micro_batch"] = 1
            said.append("--micro-batch 1")
    return model, cluster, _workload(options, **chosen), ", ".join(said)


def _workload(options: Mapping[str, Any], **chosen: int) -> Workload:
    mistakes, text, stack = Mistakes(), options["lora"], options["stack"]
    if stack.endswith(".toml"):
        stack = mistakes.of(lambda: read_stack_file(options["stack"])) or OURS
    lora = None if text is None else mistakes.of(lambda: Lora.of(text))
    given = o.fields_among(Workload, options) | {"lora": lora, "stack": stack}
    given |= {name: False for name in _TRIED if given.get(name) is None}
    found = mistakes.of(lambda: Workload(**given | chosen))
    mistakes.end()
    assert found is not None
    return found


def pipeline_of(options: Mapping[str, Any]) -> Pipeline:
    """Returns the options' pipeline, by default "interleaved" if a stage has several chunks."""
    usual = "interleaved" if options["virtual"] > 1 else "1f1b"
    return Pipeline(options["pp"], options["schedule"] or usual, options["virtual"])


def check_given(options: Mapping[str, Any]) -> Cluster:
    """Checks all options, before anything slow is imported or read; returns the cluster, or raises one
    MistakesError for all that is missing or wrong."""
    text, seq_len = options["model"] or "", options["seq_len"]
    mistakes = Mistakes()
    missing = [name for name in ("model", "gpu") if not options[name]]
    if seq_len is None and "=" in text and "seq_len=" not in text:
        missing.append("seq_len")
    mistakes.each += [_ASKED[name] for name in missing]
    model = mistakes.of(partial(_checked_model, text, seq_len)) if text else None
    chosen = {} if seq_len is not None else {"seq_len": _LENGTH}
    work = mistakes.of(lambda: _workload(options, **chosen))
    if model is not None and work is not None:
        mistakes.of(lambda: with_lora(model, work.lora))
    cluster, stages = _check_cluster(options, mistakes), 1
    if "pp" in options:
        stages = mistakes.of(partial(check_size, "pp", options["pp"])) or 1
        mistakes.of(lambda: pipeline_of({**options, "pp": stages}))
    if cluster is not None and cluster.world_size % stages:
        mistakes.each.append(f"{stages} stages don't divide {cluster.world_size} GPUs")
    elif cluster is not None:
        _check_layout(options, cluster.world_size // stages, mistakes)
    if options.get("memory_limit") is not None:
        mistakes.of(lambda: check_number("memory_limit", options["memory_limit"], "of GiB "))
    for kind in options.get("kinds", ()):
        mistakes.of(partial(check_choice, "checkpointing", kind, CHECKPOINTING))
    mistakes.each += [
        f"run is {log}; there is no such file"
        for log in options.get("run", ())
        if not log.is_file()
    ]
    for name in ("html", "out"):
        mistakes.of(partial(check_folder, name, options.get(name)))
    end(mistakes, options)
    assert cluster is not None
    return cluster


def end(mistakes: Mistakes, options: Mapping[str, Any]) -> None:
    """Raises a MistakesError if there are mistakes; its messages name the options, such as --seq-len."""

    def as_option(text: str) -> str:
        name = re.match(r"(\w+) is ", text)
        if name is None or name[1] not in options:
            return text
        return f"--{name[1].replace('_', '-')}{text[name.end(1) :]}"

    if mistakes.each:
        raise MistakesError(map(as_option, mistakes.each))


def check_folder(name: str, path: Path | None) -> None:
    """Raises PlanningError if the folder of the file ``path`` doesn't exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise PlanningError(f"{name} is {path}; there is no folder {path.parent}")


def _check_cluster(options: Mapping[str, Any], mistakes: Mistakes) -> Cluster | None:
    name, profile = options["gpu"], options["profile"]
    sizes: dict[str, Any] = {key: options.get(key) for key in ("nodes", "gpus_per_node", "nic")}
    found = mistakes.of(lambda: resolve_gpu(name, profile)) if name else None
    if found is not None:
        sizes["nodes"] = 1 if sizes["nodes"] is None else sizes["nodes"]
        return mistakes.of(lambda: Cluster(found, **sizes))
    for key in ("nodes", "gpus_per_node"):
        if sizes[key] is not None:
            mistakes.of(partial(check_size, key, sizes[key]))
    return None


def _check_layout(options: Mapping[str, Any], world: int, mistakes: Mistakes) -> None:
    """Checks one layout, or the sizes of each axis to try, for ``world`` GPUs (of one pipeline stage); adds
    what is wrong to ``mistakes``."""
    sizes = {axis: options[axis] for axis in o.LAYOUT if options.get(axis) is not None}
    if all(isinstance(size, int) for size in sizes.values()):
        if sizes:
            mistakes.of(lambda: MeshLayout(**sizes).resolve(world))
        return
    for axis, tried in sizes.items():
        wrong = [n for n in tried if n < 1 or (axis != "ep" and world % n)]
        near = [n for n in range(1, world + 1) if world % n == 0]
        mistakes.each += [
            f"{axis} is {n}; it must divide the {world} GPUs, as "
            f"{', '.join(map(str, sorted(sorted(near, key=lambda d: abs(d - n))[:3])))} do"
            for n in wrong
        ]


def usual_batch(seq_len: int, ranks: int) -> int:
    """Returns the default global batch: about 4M tokens, divisible by as many ranks as possible."""
    wanted = max(_STEP // seq_len, 1)
    by = max(n for n in range(1, min(ranks, wanted) + 1) if ranks % n == 0)
    return round(wanted / by) * by


# ``--model``: a name, a config.json, or shapes.

_KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    bool: (lambda text: ConfigParser.BOOLEAN_STATES[text.lower()], "true or false"),
}


def read_model(text: str, seq_len: int | None = None) -> ModelSpec:
    """Returns the model that ``text`` (``--model``) describes. ``seq_len``: longest sequence of a model given
    by shapes."""
    if "=" in text:
        return spec_from_shapes(**{"seq_len": seq_len or 0, **_shapes(text)})
    return _of_module(text, seq_len) if ":" in text else spec_from_hf_config(text)


def _checked_model(text: str, seq_len: int | None) -> ModelSpec | None:
    """As ``read_model``; but None for a user's own module, whose package only must exist."""
    if "=" in text or ":" not in text:
        return read_model(text, seq_len)
    package = text.partition(":")[0].partition(".")[0]
    o.add_current_folder()
    if not package or (package not in sys.modules and find_spec(package) is None):
        raise PlanningError(f"--model is {text}; there is no module {package!r}")
    return None


def _of_module(text: str, seq_len: int | None) -> ModelSpec:
    """Returns the spec of the model that the user's function "package.module:name" returns, alone or with an
    example."""
    build = o.function_named("--model", text)
    import torch

    from parallel3d.planner.from_module import spec_from_module
    from parallel3d.testing.samples import errors_named

    with errors_named(f"--model: {text}"), torch.device("meta"):
        made = build()
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    try:
        return spec_from_module(model, example, seq_len=seq_len, name=text)
    except PlanningError as error:
        if example is not None:
            raise
        raise PlanningError(f"{error}. For --model, {text} may return (model, example)") from error


def _shapes(text: str) -> dict[str, Any]:
    """Returns the arguments of ``spec_from_shapes`` that a text such as "layers=32,hidden=4096" gives."""
    known = inspect.signature(spec_from_shapes, eval_str=True).parameters
    mistakes, shapes = Mistakes(), {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            mistakes.each.append(
                f"--model has {part!r}; shapes are name=value, the nearest: {', '.join(near)}"
            )
            continue
        convert, what = _KINDS.get(known[name].annotation, (int, "an int"))
        try:
            shapes[name] = convert(value)
        except (ValueError, KeyError):
            mistakes.each.append(f"--model has {name}={value}; it must be {what}")
            shapes[name] = None
    needed = [n for n, p in known.items() if p.default is inspect.Parameter.empty]
    if lacking := [name for name in needed if name not in shapes]:
        mistakes.each.append(f"--model lacks {', '.join(lacking)}: shapes need {', '.join(needed)}")
    mistakes.end()
    return shapes
