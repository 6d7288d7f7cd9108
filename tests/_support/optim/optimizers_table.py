"""Writes ``docs/optimizers.md``: torch's and pytorch_optimizer's classes, on DTensors and by ``optim.local``.

    python tests/_support/optim/optimizers_table.py

Trains a small model for 30 steps with each class, plain, and on two gloo processes: the class itself on the
model's DTensors, and through ``optim.local`` with nothing said, ``elementwise=True`` and ``matrix=True``.
What is compared is how far the weights are from the plain ones, in parts of how far those have moved. Exits
with 1 if one is neither right nor refused; of the class itself, if it is wrong and not known for it.
Schedules, averages and wrappers: ``around_optimizers.py``.
"""

import contextlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from torch import distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import parallel3d as p3d
from _support.optim import around_optimizers
from parallel3d.optim.known import is_known_elementwise

PAGE = ROOT / "docs" / "optimizers.md"
STEPS = 30
RIGHT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The largest distance, in parts of the movement, that rounding explains."""
ITSELF = "the class itself"
SAID: dict[str, dict[str, Any] | None] = {
    ITSELF: None,
    "nothing said": {},
    "`elementwise=True`": {"elementwise": True},
    "`matrix=True`": {"matrix": True},
}
KNOWN_WRONG = {
    "pytorch_optimizer.Gravity": "it draws its first state at random, and DTensors draw other numbers than "
    "one process does",
    "torch.optim.Muon": "it computes in bfloat16, where sums over parts round otherwise; through "
    "`optim.local` the weights are the plain ones",
}
"""Classes that train on DTensors with other numbers, without an error, and why."""
FALSE = {
    "`elementwise=True`": (
        "A2Grad ASGD AdaFactor AdaGC AdaNorm AdaShift AdaTAM Adai Adalite AdamP AdamS AggMo "
        "Aida Alice Amos ApolloDQN AvaGrad CAME Conda DASH DAdaptAdaGrad DAdaptAdam DAdaptAdan "
        "DAdaptLion DAdaptSGD DeMo EmoFact EmoLynx EmoNavi FAdam FlashAdamW Fromage Gravity "
        "Kron LARS Lamb LoRARite MARS Magma Nero NovoGrad Prodigy QHAdam RACS ROSE Ranger SCION "
        "SCIONLight SGDP SGDSaI SM3 SOAP SPAM SPlus SWATS SaRA ScalableShampoo Shampoo "
        "StableAdamW StableSPAM TAM"
    ),
    "`matrix=True`": (
        "ASGD AdaGC AdaShift Adai AdamS AggMo AvaGrad Conda DASH DAdaptAdaGrad DAdaptAdam "
        "DAdaptAdan DAdaptLion DAdaptSGD DeMo EmoFact EmoLynx EmoNavi Gravity Kron LoRARite "
        "Magma Prodigy SCION SOAP SPlus SaRA ScalableShampoo"
    ),
}
"""Classes of pytorch_optimizer of which a word isn't true, also where few steps don't show it: a clip that
these gradients don't reach, a mean over parameters, blocks, a loss. They are not run with it."""
_TORCHS = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam")
TORCHS = (*_TORCHS, "RAdam", "RMSprop", "Rprop", "SGD")


def classes() -> dict[str, Any]:
    """Name -> class, of torch and the package."""
    found = {f"torch.optim.{name}": getattr(torch.optim, name) for name in TORCHS}
    for _, each in sorted(vars(pytorch_optimizer).items()):
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer):
            found.setdefault(f"pytorch_optimizer.{each.__name__}", each)
    return found


def model() -> nn.Sequential:
    """Weights before a norm, which some classes treat differently, and after."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16, bias=False), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 6)
    )


def train(made: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[Any]:
    """The weights after training on this rank's share of each batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sharded = any(hasattr(p, "full_tensor") for p in made.parameters())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 12, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randint(0, 6, (8,), generator=generator)
        if sharded:
            x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(made(x), y).backward()
        optimizer.step()
    weights: list[Any] = list(made.parameters())
    return [(w.full_tensor() if hasattr(w, "full_tensor") else w).detach() for w in weights]


def parameters(made: nn.Module, cls: Any) -> list[nn.Parameter]:
    """What ``cls`` is given: torch's Muon takes matrices alone."""
    return [p for p in made.parameters() if cls is not torch.optim.Muon or p.dim() == 2]


def plain(cls: Any) -> tuple[torch.dtype, list[torch.Tensor]] | str:
    """The weights, in float64 if it can; or why it does not run so."""
    why = ""
    for dtype in RIGHT:
        made = model().to(dtype)
        try:
            return dtype, train(made, cls(parameters(made, cls)), dtype)
        except Exception as error:
            why = why or f"{type(error).__name__}: {error}"
    return why


def outcome(way: str, cls: Any, mesh: Any, dtype: torch.dtype, want: list[torch.Tensor]) -> str:
    """``right``, ``wrong ...``, ``refused``, or the error's name."""
    made, start = model().to(dtype), list(model().to(dtype).parameters())
    try:
        p3d.parallelize(made, mesh, units=["0", "3"])
        said, params = SAID[way], parameters(made, cls)
        optimizer = cls(params) if said is None else p3d.optim.local(cls, params, **said)
        got = train(made, optimizer, dtype)
    except p3d.Parallel3dError:
        result = "refused"
    except Exception as error:
        result = type(error).__name__
    else:
        apart = max(
            ((a - b).norm() / (b - c).norm().clamp(min=1e-12)).item()
            for a, b, c in zip(got, want, start, strict=True)
        )
        result = "right" if apart <= RIGHT[dtype] else f"wrong ({apart:.0e})"
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, result)
    wrong = [r for r in everyones if r.startswith("wrong")]
    return (wrong or sorted(set(everyones), key=everyones.index))[0]


def outcomes(names: list[str]) -> dict[str, Any]:
    """Run by every rank: name -> way -> outcome; or why the class does not run plain, a text."""
    table: dict[str, Any] = {}
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=dist.get_world_size()), device_type="cpu")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        for name, cls in classes().items():
            if name not in names:
                continue
            reference = plain(cls)
            if isinstance(reference, str):
                table[name] = reference
                continue
            package, short = name.rsplit(".", 1)
            table[name] = {
                way: "no"
                if package == "pytorch_optimizer" and short in FALSE.get(way, "").split()
                else outcome(way, cls, mesh, *reference)
                for way in SAID
            }
    return table


def faults(table: dict[str, Any]) -> list[str]:
    """What of ``table`` must not be."""
    found = []
    for name, row in table.items():
        if isinstance(row, str):
            continue
        for way, o in row.items():
            wrong = o.startswith("wrong") and name not in KNOWN_WRONG
            if wrong if way == ITSELF else o not in ("right", "refused", "no"):
                found.append(f"{name}, {way}: {o}")
    return found


_HEAD = """# Optimizers

Written by `python tests/_support/optim/optimizers_table.py`; `tests/optim/test_optimizers.py` tries all
of it again.

Each class of `torch.optim` and of the package `pytorch_optimizer` {version} that runs with its defaults on a
plain model, after {steps} steps on two processes, torch {torch}: the class itself on the model's DTensors,
and through `parallel3d.optim.local`, where nothing was said of it, and where `elementwise=True` or
`matrix=True` was said. *right*: the plain model's weights, up to rounding. *refused*: a
`Parallel3dError` that says what to do. A name is the error that was raised instead.

The class itself runs torch's operations on DTensors, as on `torch.distributed.fsdp.fully_shard`. What those
lack ends in the error named, often within the step: parameters before that one have moved. Where it is
**wrong, without an error**:

{wrong}

`optim.local` refuses every class of which nothing is known or said. Known are torch's elementwise ones, Muon,
Adafactor and torchao's: [`parallel3d/optim/known.py`](../parallel3d/optim/known.py). What a user says of
another class is taken as true, so say what is *right* in its row. *no*: it isn't true of the class, which
would train on other numbers, here or with other gradients (a clip, a mean over parameters).

"""


_QUANTIZED = """
## Quantized state

torchao's `AdamW8bit`, `AdamW4bit`, `AdamWFp8` (and `Adam...`) keep their moments in blocks of consecutive
elements, each with one scale. The class itself, on shards, quantizes other blocks than one process does, or
none (pytorch/ao 4912). Through `optim.local` the weights are those of one process, to the bit, on every mesh:

<!-- not run: two lines of a program that needs torchao -->
```python
model = p3d.parallelize(model, mesh, fsdp=p3d.Sharding(block=256))  # AdamW4bit: 128
optimizer = p3d.optim.local(AdamW8bit, model, lr=1e-4)
```

- `block`, the optimizer's `block_size`, makes shards whole blocks of the flattened parameter, and the step
  needs no communication. Rows that share a block stay on one rank; the last ranks have fewer rows, or none.
- Blocks stay divided where tp divides them (a `rowwise` weight whose columns on a rank are no multiple of
  256), where whole ones would pad a parameter by more than 0.5 % (a vector by more than 65,536 elements), or
  without `block`. Such a parameter and its gradient are gathered for the step, each rank steps on some of its
  rows, and they are gathered again. The numbers are the same.
- Of Llama 3 8B and 70B, Qwen 3 32B and Gemma 2 9B no weight is divided on 8, 64 or 256 ranks, nor with tp up
  to 4, and with tp=8 only Qwen's `down_proj` (3,200 columns a rank). GPT-2 XL, of 1,600 columns, is whole on
  8 ranks; on 64 the weights of its attention are divided.
- A parameter of fewer than 4,096 elements, or whose size is no multiple of `block_size`, has ordinary state,
  as on one process, and is sharded as without `block`.
- The state's entries are DTensors of one shape on all meshes: `exp_avg.codes` and `exp_avg.scale`. They exist
  before the first step. `checkpoint.save`, `save_dcp` and torch's state dicts store them, and another mesh,
  or one process with `optim.local`, continues with the same bits. A state dict of the class itself has other
  entries.
- 8-bit and fp8 state has 2.03 bytes a parameter, 4-bit 1.06, which a [dry run](dryrun.md) shows.
- torchao compiles its step, for each size of a part; a CPU needs a C++ compiler. `bf16_stochastic_round`
  draws other numbers on each mesh. torchao's step fails with `amsgrad` of quantized state.

`optim.local(torch.optim.Adafactor, model)` steps on whole parameters, so its statistics of rows and columns
are those of one process too.
"""

_AROUND = """
## Around an optimizer

torch's schedulers and averages of weights, and wrappers of `pytorch_optimizer`, with the classes themselves
on DTensors and with `optim.local`, after {steps} steps in float64: *right* is within {right:.0e} of the plain
weights, and of the plain averages. Give `ReduceLROnPlateau` the loss of all ranks, and `update_bn` the same
batches on each rank; `AveragedModel` copies the sharded model, which `torch.distributed.fsdp` refuses. `SAM`
takes the function that makes the optimizer as `base_optimizer`. `Lookahead` raises at its first exchange:
torch has no `_foreach_copy_` for DTensors.
"""


def page(table: dict[str, Any], around: dict[str, dict[str, str]]) -> str:
    """The text of ``docs/optimizers.md``."""
    rows = {name: row for name, row in table.items() if not isinstance(row, str)}
    lines = [
        _HEAD.format(
            wrong="".join(f"- `{name}`: {why}.\n" for name, why in KNOWN_WRONG.items()),
            version=pytorch_optimizer.__version__
            if hasattr(pytorch_optimizer, "__version__")
            else "",
            steps=STEPS,
            torch=torch.__version__.split("+")[0],
        ).replace("  ", " ")
    ]
    lines.append(
        f"| of {len(rows)} | right | refused | wrong | no | other error |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    for way in SAID:
        kinds = [row[way].split()[0] for row in rows.values()]
        counts = [kinds.count(kind) for kind in ("right", "refused", "wrong", "no")]
        counts.append(len(kinds) - sum(counts))
        lines.append(f"| {way} | {' | '.join(map(str, counts))} |\n")
    lines.append(f"\n| class | {' | '.join(SAID)} |\n|{' --- |' * (1 + len(SAID))}\n")
    lines += [
        f"| `{name}` | {' | '.join(row[way] for way in SAID)} |\n" for name, row in rows.items()
    ]
    others = ", ".join(f"`{name}`" for name, row in table.items() if isinstance(row, str))
    lines.append(
        f"\nThese need more than parameters, or other ones, and were not tried: {others}.\n"
    )
    lines.append(_QUANTIZED)
    lines.append(_AROUND.format(steps=around_optimizers.STEPS, right=around_optimizers.RIGHT))
    lines += around_optimizers.table_lines(around)
    return "".join(lines)


def main() -> int:
    from parallel3d.testing import GlooPool, WorkerError

    table: dict[str, Any] = {}
    with GlooPool(2) as pool:
        for name in classes():
            try:
                table |= pool.run(outcomes, [name], world_size=2, timeout=120)[0]
            except WorkerError as error:
                table[name] = dict.fromkeys(SAID, f"ended: {error}".split(chr(10))[0][:80])
            print(name, table[name], flush=True)
        names = list(around_optimizers.AROUND)
        around = pool.run(around_optimizers.outcomes, names, world_size=2, timeout=600)[0]
    PAGE.write_text(page(table, around))
    wrong = faults(table) + around_optimizers.faults(around)
    print("\n".join(wrong) or f"{PAGE}: {len(table)} classes")
    unknown = [name for name, cls in classes().items() if is_known_elementwise(cls)]
    print(f"known to be elementwise: {', '.join(unknown)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
