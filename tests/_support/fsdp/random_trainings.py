"""Random trainings by ``parallelize``, of every axis and option: what two ways of one must have in common."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import parallel3d as p3d
from _support.audit import models as attention
from _support.ep import models as mixture
from parallel3d import MeshLayout, MixedPrecisionPolicy, Sharding
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import full_params
from parallel3d.testing import LocalWorld, local_world

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = [
    None,
    MixedPrecisionPolicy(BF16, FP32),
    MixedPrecisionPolicy(BF16, BF16),
    MixedPrecisionPolicy(FP32, BF16),
    MixedPrecisionPolicy(torch.float16, torch.float16),
    MixedPrecisionPolicy(BF16, FP32, wire_dtype=BF16),
    MixedPrecisionPolicy(None, FP32, wire_dtype=BF16),
    MixedPrecisionPolicy(BF16, FP32, full_precision_modules=(nn.LayerNorm,)),
    MixedPrecisionPolicy(BF16, FP32, full_precision_in_eval=True),
]
ACTS = ("evaluation", "inference", "full_params", "unshard", "prefetch", "state_dict")
FAILURES = ("forward", "backward")


class Tied(attention.Net):
    """Head and embedding have one weight; it holds a parameter itself."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.head.weight = self.tok.weight
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, attention.WIDTH))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return super().trunk(x * self.gain)


class Twice(attention.Net):
    """Its first block runs again at the end."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](super().trunk(x))


class Partly(attention.Net):
    """A block and a half are frozen, one is not reached by the loss, and one has twice the width."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.layers[0].requires_grad_(False)
        self.layers[2].q.requires_grad_(False)
        self.layers[3].up = nn.Linear(attention.WIDTH, 80)
        self.layers[3].down = nn.Linear(80, attention.WIDTH)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = layer(x)
        self.layers[4](x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "five blocks": lambda: attention.Net(depth=5),
    "tied": Tied,
    "a block twice": Twice,
    "partly trained": Partly,
    "dropout": lambda: attention.Net(lambda: attention.Block(0.3), 4),
}


@dataclass(frozen=True)
class Training:
    """A model, its mesh and what is done with it.

    Attributes:
        options: of ``parallelize``.
        micro: micro-batches a step; ``off``: the switch that is off in all but the last.
        prefetch: whether lists name what is gathered ahead, two at a time. inputs: how many inputs of
            reductions may be in flight; 0: the default.
        acts: for each step, what comes before it, of ``ACTS``.
        fails: what raises in the second step, which is then made again.
        local: whether the optimizer is ``optim.local``.
    """

    layout: MeshLayout
    model: str
    options: dict[str, Any]
    micro: int = 1
    off: str = ""
    prefetch: bool = False
    inputs: int = 0
    acts: tuple[tuple[str, ...], ...] = ((), ())
    fails: str = ""
    local: bool = False
    seed: int = 0


def random_training(seed: int, *, simulated: bool = True) -> Training:
    """Returns the training drawn from ``seed``. What can't be simulated is drawn on processes alone."""
    draw = random.Random(seed)
    sizes = [(r, s, c, t) for r in (1, 2, 3) for s in (1, 2, 3, 4) for c in (1, 2) for t in (1, 2)]
    most = 8 if simulated else 4
    sizes = [size for size in sizes if 1 < size[0] * size[1] * size[2] * size[3] <= most]
    if not simulated:
        sizes = [size for size in sizes if size[0] * size[1] * size[2] * size[3] == 4]
    replicate, shard, cp, tp = draw.choice(sizes)
    ep = 2 if draw.random() < 0.25 and cp == tp == 1 and shard % 2 == 0 else 1
    layout = MeshLayout(replicate, shard, tp, cp=cp, ep=ep)
    kinds = [False, False, True, "selective"] + ([] if simulated else ["offload"])
    hfsdp = replicate > 1 and shard > 1 and draw.random() < 0.3
    policies = POLICIES[:5] if ep > 1 and simulated else POLICIES
    options: dict[str, Any] = {
        "activation_checkpointing": draw.choice(kinds),
        "mp_policy": draw.choice(policies),
        "fsdp": Sharding(
            reshard_after_forward=draw.choice([None, True, False]),
            shard_optimizer_over_replicate=hfsdp,
        ),
    }
    if tp > 1:
        options["tp_plan"] = attention.PLAN
    if cp > 1:
        options["context_parallel"] = draw.choice(["ulysses", "gather", "ring"])
    if not simulated and draw.random() < 0.3:
        options["compile"] = "aot_eager"
        if cp > 1 or tp > 1:
            options["activation_checkpointing"] = draw.choice([False, True])
    training = Training(
        layout,
        "experts" if ep > 1 else draw.choice(list(MODELS)),
        options,
        micro=draw.choice([1, 1, 2, 3]),
        off=draw.choice(["", "set_requires_gradient_sync", "set_requires_all_reduce"]),
        prefetch=draw.random() < 0.3,
        inputs=draw.choice([0, 0, 1, 2]),
        acts=tuple(
            tuple(act for act in ACTS if draw.random() < 0.25) for _ in range(draw.choice([2, 3]))
        ),
        fails=draw.choice(["", "", *FAILURES]),
        local=draw.random() < 0.5,
        seed=seed,
    )
    options["fsdp"] = replace(options["fsdp"], block=draw.choice([None, None, None, 16]))
    return training


class Broken(Exception):
    """What a step raises."""


def _part(every: list[tuple[torch.Tensor, ...]], at: int, rank: int) -> torch.Tensor:
    return every[rank][at]


class Run:
    """One training, and all that it computes: ``found``, (what, its numbers)."""

    def __init__(self, training: Training, world: LocalWorld | None, **options: Any) -> None:
        self.training, self.world = training, world
        self.found: list[tuple[str, torch.Tensor]] = []
        with world.paused() if world else nullcontext():
            torch.manual_seed(training.seed)
            is_mixture = training.model == "experts"
            model: Any = mixture.Mixture(experts=8) if is_mixture else MODELS[training.model]()
        self.is_mixture = is_mixture
        self.mesh = p3d.build_mesh(training.layout, device_type="cpu")
        checks = p3d.Checks(audit=False)
        self.model: Any = p3d.parallelize(
            model, self.mesh, checks=checks, **training.options, **options
        )
        layers = list(self.model.layers)
        if training.prefetch:
            for at, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 3])
                layer.set_modules_to_backward_prefetch(layers[max(at - 2, 0) : at][::-1])
        if training.inputs:
            self.model.set_reduce_scatter_max_input_buffers(training.inputs)
        params = [p for p in self.model.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW
        self.optimizer = (
            p3d.optim.local(adamw, params, lr=1e-2) if training.local else adamw(params, lr=1e-2)
        )

    def batch(self, sample: int) -> Any:
        layout = self.training.layout

        def of_rank(rank: int) -> tuple[torch.Tensor, ...]:
            seed = 1000 * sample + layout.data_rank(rank)
            if self.is_mixture:
                return (mixture.batch(seed),)
            ids = attention.tokens(seed=seed)
            return ids[:, :-1], ids[:, 1:]

        if self.world is None:
            whole = of_rank(torch.distributed.get_rank())
        else:
            with self.world.paused():
                every = [of_rank(rank) for rank in range(layout.world_size)]
            count = len(every[0])
            whole = tuple(self.world.map(partial(_part, every, at)) for at in range(count))
        return whole if self.is_mixture else p3d.cp.shard_batch(whole, self.mesh)

    def loss(self, batch: Any) -> torch.Tensor:
        if self.is_mixture:
            return self.model(*batch).float().square().mean()
        return attention.loss_of(self.model, batch)

    def note(self, what: str, tensor: torch.Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        self.found += [(what, each.detach().clone()) for each in inner_tensors(local)]

    def act(self, what: str, batch: Any, number: int) -> None:
        model = self.model
        layer = model.layers[number % len(model.layers)]
        if what in ("evaluation", "inference"):
            model.eval()
            with torch.no_grad() if what == "evaluation" else torch.inference_mode():
                self.note(what, model(batch[0]).clone())
            model.train()
        elif what == "full_params":
            with full_params(model):
                for name, param in model.named_parameters():
                    self.note(f"{what}: {name}", param)
        elif what == "unshard":
            layer.unshard()
            for name, param in layer.named_parameters():
                self.note(f"{what}: {name}", param)
            if number % 2:
                layer.reshard()
        elif what == "prefetch":
            layer.unshard(async_op=True)
        else:
            for name, value in model.state_dict().items():
                self.note(f"{what}: {name}", value)

    def broken(self, batch: Any) -> None:
        """A forward and backward that end in an exception."""
        layer = self.model.layers[1]

        def fail(*_: Any) -> None:
            raise Broken

        if self.training.fails == "forward":
            handle = layer.register_forward_pre_hook(fail)
        else:

            def hook(_: nn.Module, args: Any, output: torch.Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(fail)

            handle = layer.register_forward_hook(hook)
        try:
            self.loss(batch).backward()
        except Broken:
            self.found.append(("failed as it should", torch.ones(())))
        finally:
            handle.remove()
        self.optimizer.zero_grad()

    def train(self) -> None:
        """All steps."""
        training, model = self.training, self.model
        torch.manual_seed(training.seed)
        for step, acts in enumerate(training.acts):
            for number, act in enumerate(acts):
                self.act(act, self.batch(10 * step + 5), number + training.seed)
            if step == 1 and training.fails:
                self.broken(self.batch(77))
            for micro in range(training.micro):
                if training.off:
                    getattr(model, training.off)(micro == training.micro - 1)
                loss = self.loss(self.batch(10 * step + micro))
                self.note("loss", loss)
                loss.backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    self.note(f"step {step}, gradient of {name}", param.grad)
            p3d.optim.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        for name, param in model.named_parameters():
            self.note(f"weight {name}", param)


def found_by(training: Training, **options: Any) -> list[tuple[str, torch.Tensor]]:
    """What the training computes: on simulated ranks, or on those of this process' group.

    Args:
        options: more of ``parallelize``.
    """
    if torch.distributed.is_initialized():
        torch.compiler.reset()  # else what is compiled depends on what was before
        run = Run(training, None, **options)
        run.train()
        return run.found
    with local_world(training.layout.world_size) as world:
        run = Run(training, world, **options)
        run.train()
        return run.found
