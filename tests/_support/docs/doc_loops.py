"""The training loops of README.md and docs/*.md: their gradients are the plain model's on the whole batch.

``watched`` looks at each optimizer step, and each clipping, that a page's code comes to, whatever the loop
looks like. What the plain model computes is said below, page by page: one that is not there fails. Blocks
that are not run, but step an optimizer, are listed with what was checked in them by reading.
"""

import ast
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import parallel3d as p3d
from _support.docs.doc_pages import Block, Section
from _support.models import Lm, lm_loss
from parallel3d._util import dry_run

Names = ChainMap[str, Any]
Loss = Callable[[Names, nn.Module], torch.Tensor]


def _of_rows(names: Names, plain: nn.Module, rows: Any) -> torch.Tensor:
    return names["loss_of"](plain, torch.cat(list(rows)))


def _hf(names: Names, plain: nn.Module) -> torch.Tensor:
    batches = list(names["micro_batches"])
    return plain(**{key: torch.cat([b[key] for b in batches]) for key in batches[0]}).loss


def _next_tokens(plain: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = plain(tokens[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def _everyones(tokens: torch.Tensor) -> torch.Tensor:
    """What all ranks have read; ranks of one tp group the same rows, which leaves their mean as it is."""
    if not torch.distributed.is_initialized():
        return tokens
    parts = [torch.empty_like(tokens) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tokens)
    return torch.cat(parts)


def _lm(names: Names) -> nn.Module:
    return Lm()


def _llama(names: Names) -> nn.Module:
    return names["Llama"](names["config"])


def _auto(names: Names) -> nn.Module:
    config = names["AutoConfig"].from_pretrained(names["folder"])
    return names["AutoModelForCausalLM"].from_config(config)


def _made(name: str) -> Callable[[Names], nn.Module]:
    """The model by the page's own class or function."""
    return lambda names: names[name]()


def _of_all(data: str) -> Loss:
    """Next tokens of what all ranks have read, which the page calls ``data``."""
    return lambda names, plain: _next_tokens(plain, _everyones(names[data]))


LOOPS: dict[str, tuple[Callable[[Names], nn.Module], Loss]] = {
    "README.md": (
        lambda names: nn.Sequential(
            nn.Embedding(256, 128),
            *[names["Block"](128, 4) for _ in range(2)],
            nn.Linear(128, 256),
        ),
        _of_all("data"),
    ),
    "capture.md": (
        lambda names: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)),
        lambda names, plain: (plain(names["batch"]["x"]) - names["batch"]["y"]).square().mean(),
    ),
    "checkpoints.md": (_lm, lambda names, plain: lm_loss(plain, names["tokens"](names["step"]))),
    "context_parallel.md": (_made("Model"), _of_all("data")),
    "expert_parallel.md": (_made("Model"), _of_all("data")),
    "from_accelerate.md": (_auto, _hf),
    "from_fsdp1.md": (
        _lm,
        lambda names, plain: _of_rows(names, plain, (names["first"], names["second"])),
    ),
    "from_fsdp2.md": (_lm, lambda names, plain: names["loss_of"](plain, names["tokens"])),
    "from_megatron_fsdp.md": (
        _made("Model"),
        lambda names, plain: _of_rows(names, plain, names["micro_batches"]),
    ),
    "from_torchtitan.md": (
        _llama,
        lambda names, plain: _next_tokens(plain, torch.cat(list(names["micro_batches"]))),
    ),
    "guards.md": (_lm, lambda names, plain: lm_loss(plain, names["batch"])),
    "index.md": (
        lambda names: nn.Sequential(
            nn.Linear(16, 64),
            *[nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True) for _ in range(2)],
            nn.Linear(64, 1),
        ),
        lambda names, plain: (plain(names["x"]) - 1).square().mean(),
    ),
    "observability.md": (_llama, _of_all("tokens")),
    "ten_minutes.md": (
        _made("build"),
        lambda names, plain: names["loss_of"](plain, _everyones(names["rows"])),
    ),
    "tutorial.md": (
        _made("Model"),
        lambda names, plain: names["loss_of"](plain, names["batch"](names["step"])),
    ),
}
"""Page -> what makes the plain model, and the loss of the whole batch."""
IN_BFLOAT16 = ("from_accelerate.md", "from_torchtitan.md")

NOT_RUN = {
    "README.md": "the model is loaded from the network",
    "from_accelerate.md": "accelerator.accumulate divides the loss itself",
    "from_fsdp1.md": "FSDP1's side: divided as ours is",
}
"""Page -> why the loops of its blocks that are not run are right."""

REFUSED = {"failures.md": "the one step on it ends in an error, which the page shows"}
"""Page -> why no optimizer of it changes anything."""


@contextmanager
def watched(section: Section, names: dict[str, Any]) -> Iterator[list[int]]:
    """Compares the gradients at each step of an optimizer within it; yields how many steps there were."""
    steps, clipped = [0], []

    def compare() -> None:
        env = _names(names)
        model = env["theirs"] if "theirs" in env and _has_gradients(env["theirs"]) else env["model"]
        assert section.page.name in LOOPS, (
            f"{section.where} steps an optimizer: say in {__name__} what the plain model computes there"
        )
        assert section.world != "fake", f"{section.where}: a step with numbers that are none"
        check_gradients(section, env, model)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if dry_run.active() or section.page.name in REFUSED or not _is_the_pages(names):
            return  # a dry run has no numbers
        steps[0] += 1
        if not clipped:
            compare()
        clipped.clear()

    def clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
        def compared(*args: Any, **kwargs: Any) -> Any:
            if not dry_run.active() and _is_the_pages(names):
                compare()
                clipped.append(True)
            return clip(*args, **kwargs)

        return compared

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with (
            mock.patch.object(p3d.optim, "clip_grad_norm_", clipping(p3d.optim.clip_grad_norm_)),
            mock.patch.object(nn.utils, "clip_grad_norm_", clipping(nn.utils.clip_grad_norm_)),
        ):
            yield steps
    finally:
        handle.remove()


def _is_the_pages(names: dict[str, Any]) -> bool:
    """Whether the step is of the page's code, and not one that ``parallel3d.testing`` makes for it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals is not names:
        if frame.f_globals.get("__name__", "").startswith("parallel3d.testing"):
            return False
        frame = frame.f_back
    return True


def _names(names: dict[str, Any]) -> Names:
    """What the page's code, and what it was called from, has names for now, the innermost first."""
    spaces, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name != "<module>":
            spaces.append(dict(frame.f_locals))
        frame = frame.f_back
    return ChainMap(*spaces, names)


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())


def check_gradients(section: Section, names: Names, model: nn.Module) -> None:
    """Raises AssertionError unless ``model`` has the plain one's gradients."""
    make, loss_of = LOOPS[section.page.name]
    tolerance = 0.1 if section.page.name in IN_BFLOAT16 else 1e-4
    with torch.random.fork_rng(devices=[]):
        plain = make(names)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    plain.load_state_dict(weights)
    with torch.enable_grad():
        loss_of(names, plain).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, param in model.named_parameters():
        if param.grad is None:
            assert wanted[name] is None, f"{section.where}: {name} has no gradient"
            continue
        apart = float((whole(param.grad) - wanted[name]).abs().max()) / largest
        assert apart <= tolerance, (
            f"{section.where}: the gradient of {name} is {apart:.0%} of the largest one from the plain "
            "model's on the whole batch; does the loop divide the loss by the number of micro-batches?"
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's; in full precision."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def steps_an_optimizer(block: Block) -> bool:
    """Whether a block of Python calls a ``step`` after a ``backward``."""
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(block.code))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return {"backward", "step"} <= called
