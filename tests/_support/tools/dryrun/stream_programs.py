"""Small training programs whose streams a dry run checks: fixed ones, and random ones by their seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from llama import SIZES, Llama, LlamaConfig
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from _support.ep.models import Mixture, batch
from _support.extended import Bf16, extend, mlp
from _support.tools.dryrun.dry_programs import parallel_llama, policy
from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d._util import dry_run
from parallel3d.fsdp import (
    CommHookState,
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    reduce_scatter_hook,
)


class Broken(Exception):
    """What a forward raises in the middle of a step."""


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        mesh: replicate, shard, tp. cp: ranks that share each sequence. attention: its kind.
        reshard: ``reshard_after_forward``. mixed: bf16 parameters, fp32 sums. inputs: how many inputs of
            reduce-scatters may be in flight; 0: the default. prefetch: lists of what is prefetched.
        micro: micro-batches. sync, all_reduce: the switches in all micro-batches but the last.
        wire: whether gradients are sent in bf16 by all-to-alls.
        hook: ``comm``, ``all_reduce`` (on its own stream without a replicate axis), ``sum``: no average;
            ``own``: a communication hook and a custom all-gather that are always asynchronous.
        recompute: what ``activation_checkpointing`` is.
        extended: parameters that say themselves what is gathered.
        raises: ``forward``, ``backward`` or ``hook`` (the communication hook): that of the second step
            raises, and the step is made again.
        unshards: whether a unit is unsharded with ``async_op=True`` after each step, and not waited for.
        evaluates: whether the weights are changed after a forward without gradients.
        event: whether the optimizer's event is given to the engine (``set_post_optim_event``).
        ep: ranks that share experts; with 1 there are none.
        static: whether buffers are at fixed addresses. capturable: whether the optimizer keeps its counts on
            the GPU.
    """

    mesh: tuple[int, int, int] = (1, 4, 1)
    cp: int = 1
    attention: str = "ring"
    reshard: bool | int | None = None
    mixed: bool = True
    inputs: int = 0
    prefetch: bool = False
    forward_prefetch: bool = False
    limit: int | None = None
    micro: int = 1
    sync: bool = True
    all_reduce: bool = True
    hook: str = ""
    hfsdp: bool = False
    wire: bool = False
    offload: bool = False
    recompute: Any = False
    sequence: bool = False
    in_backward: bool = False
    clip: bool = True
    extended: bool = False
    raises: str = ""
    unshards: bool = False
    evaluates: bool = False
    event: bool = False
    ep: int = 1
    local: bool = False
    static: bool = False
    capturable: bool = False
    steps: int = 3

    @property
    def world_size(self) -> int:
        replicate, shard, tp = self.mesh
        return replicate * shard * tp * self.cp


OFFLOADED = p3d.ActivationOffload(pool_gib=0.25, min_kib=0)

CASES: dict[str, Program] = {
    "FSDP": Program(),
    "FSDP, one dtype": Program(mixed=False),
    "replicate only": Program(mesh=(4, 1, 1)),
    "replicate only, accumulated": Program(mesh=(4, 1, 1), micro=3, sync=False),
    "HSDP": Program(mesh=(2, 2, 1)),
    "HSDP, accumulated": Program(mesh=(2, 2, 1), micro=3, all_reduce=False),
    "FSDP, accumulated without reduction": Program(micro=3, sync=False),
    "HFSDP": Program(mesh=(2, 2, 1), hfsdp=True),
    "HFSDP, one dtype, prefetch lists": Program(
        mesh=(2, 2, 1), hfsdp=True, mixed=False, prefetch=True, reshard=False
    ),
    "HFSDP, accumulated": Program(mesh=(2, 2, 1), hfsdp=True, micro=2, all_reduce=False),
    "a wire of bf16": Program(wire=True, inputs=2),
    "a wire of bf16, HSDP": Program(mesh=(2, 2, 1), wire=True),
    "a wire of bf16, HSDP, accumulated": Program(
        mesh=(2, 2, 1), wire=True, micro=3, all_reduce=False
    ),
    "a wire of bf16, replicate only": Program(mesh=(4, 1, 1), wire=True, micro=2, sync=False),
    "a wire of bf16, HFSDP": Program(mesh=(2, 2, 1), hfsdp=True, wire=True),
    "a wire of bf16, tp, fp32": Program(mesh=(2, 2, 2), wire=True, mixed=False, sequence=True),
    "tp": Program(mesh=(1, 2, 2)),
    "tp with sequence parallel": Program(mesh=(2, 2, 2), sequence=True),
    "tp alone": Program(mesh=(1, 1, 2), sequence=True),
    "offload": Program(offload=True),
    "offload, HSDP": Program(mesh=(2, 2, 1), offload=True),
    "offload, accumulated": Program(mesh=(2, 2, 1), offload=True, micro=2, all_reduce=False),
    "offload, prefetch lists": Program(offload=True, prefetch=True),
    "offload, one rank": Program(mesh=(1, 1, 1), offload=True),
    "comm hook": Program(hook="comm"),
    "comm hook, HSDP": Program(mesh=(2, 2, 1), hook="comm"),
    "collectives of the user's": Program(mesh=(2, 2, 1), hook="own"),
    "all-reduce hook on a stream": Program(hook="all_reduce"),
    "all-reduce hook, HSDP": Program(mesh=(2, 2, 1), hook="all_reduce"),
    "sums": Program(mesh=(2, 2, 1), hook="sum"),
    "prefetch lists": Program(mesh=(2, 2, 1), prefetch=True),
    "forward prefetch": Program(forward_prefetch=True),
    "a limit": Program(forward_prefetch=True, prefetch=True, limit=1),
    "three inputs": Program(mesh=(2, 2, 1), inputs=3),
    "not resharded": Program(reshard=False),
    "resharded to 2": Program(reshard=2),
    "recomputed": Program(mesh=(2, 2, 1), recompute=True),
    "recomputed selectively": Program(mesh=(2, 2, 1), recompute="selective"),
    "recomputed selectively, tp": Program(mesh=(1, 2, 2), recompute="selective"),
    "recomputed selectively, sequence": Program(
        mesh=(2, 1, 2), recompute="selective", sequence=True
    ),
    "activations offloaded": Program(recompute=OFFLOADED),
    "activations offloaded, HSDP": Program(mesh=(2, 2, 1), recompute=OFFLOADED, micro=2),
    "activations offloaded, replicate": Program(mesh=(4, 1, 1), recompute=OFFLOADED),
    "activations offloaded, sequence": Program(mesh=(1, 2, 2), recompute=OFFLOADED, sequence=True),
    "activations offloaded, a small pool": Program(recompute=replace(OFFLOADED, pool_gib=2**-14)),
    "activations offloaded, a forward that raises": Program(recompute=OFFLOADED, raises="forward"),
    "activations offloaded, a backward that raises": Program(
        mesh=(2, 2, 1), recompute=OFFLOADED, raises="backward"
    ),
    "extensions": Program(extended=True, mixed=False),
    "step in backward": Program(in_backward=True, clip=False),
    "step in backward, HSDP": Program(mesh=(2, 2, 1), in_backward=True, clip=False),
    "a forward that raises": Program(raises="forward"),
    "a forward that raises, HSDP, offload": Program(mesh=(2, 2, 1), raises="forward", offload=True),
    "a forward that raises, prefetch lists": Program(raises="forward", prefetch=True),
    "a backward that raises": Program(mesh=(2, 2, 1), raises="backward", prefetch=True, inputs=3),
    "a reduction that raises": Program(hook="comm", raises="hook"),
    "HFSDP, one dtype, unsharded early": Program(
        mesh=(2, 2, 1), hfsdp=True, mixed=False, unshards=True
    ),
    "offload, evaluated": Program(offload=True, evaluates=True, mixed=False),
    "cp, ulysses": Program(mesh=(1, 2, 1), cp=2, attention="ulysses"),
    "cp, gather": Program(mesh=(2, 1, 1), cp=2, attention="gather", micro=2),
    "cp, ring": Program(mesh=(1, 2, 1), cp=4),
    "cp, ring, recomputed": Program(mesh=(1, 1, 1), cp=4, recompute=True),
    "cp, ring, recomputed selectively": Program(mesh=(1, 1, 1), cp=4, recompute="selective"),
    "cp, ring, activations offloaded, sequence": Program(
        mesh=(1, 1, 2), cp=2, recompute=OFFLOADED, sequence=True
    ),
    "cp, a forward that raises": Program(mesh=(2, 1, 1), cp=2, raises="forward"),
    "optimizer's event": Program(event=True),
    "local optimizer": Program(mesh=(2, 2, 1), local=True),
    "experts": Program(ep=2),
    "experts, HSDP, accumulated": Program(mesh=(2, 2, 1), ep=2, micro=2, all_reduce=False),
    "experts, HFSDP": Program(mesh=(2, 2, 1), ep=2, hfsdp=True),
    "experts, tp, activations offloaded": Program(mesh=(1, 2, 2), ep=4, recompute=OFFLOADED),
    "experts, recomputed selectively": Program(ep=4, recompute="selective"),
    "experts, a forward that raises": Program(ep=2, raises="forward"),
    "experts, step in backward": Program(ep=2, in_backward=True, clip=False),
}


def random_program(seed: int) -> Program:
    """Returns a program drawn from ``seed``; those that can't be are never drawn."""
    draw = random.Random(seed)
    tp = draw.choice([1, 1, 2])
    replicate, shard = draw.choice([(1, 2), (1, 4), (2, 2), (3, 1), (2, 1), (1, 1), (1, 3), (2, 3)])
    often, seldom = (lambda: draw.random() < 0.5), (lambda: draw.random() < 0.2)
    cp = draw.choice([1, 1, 2, 3])
    alone = tp > 1 or cp > 1  # wrapped by ``parallelize``, which has fewer options
    hfsdp = replicate > 1 and shard > 1 and seldom()
    in_backward = not hfsdp and seldom()
    micro = 1 if in_backward else draw.choice([1, 1, 2, 3])
    program = Program(
        mesh=(replicate, shard, tp),
        cp=cp,
        attention=draw.choice(["ulysses", "gather", "ring"]),
        reshard=draw.choice([None, True, False]),
        mixed=often(),
        inputs=draw.choice([0, 1, 2, 3]),
        prefetch=often(),
        forward_prefetch=often(),
        limit=draw.choice([None, 1, 2]),
        micro=micro,
        sync=often(),
        all_reduce=often(),
        hook=draw.choice(["", "", "comm", "all_reduce", "sum"]) if not alone and not hfsdp else "",
        hfsdp=hfsdp,
        offload=not alone and not in_backward and seldom(),
        recompute=alone and draw.choice([False, False, True, "selective", OFFLOADED]),
        sequence=tp > 1 and often(),
        in_backward=in_backward,
        clip=not in_backward and often(),
        raises="forward" if seldom() else "",
        evaluates=seldom(),
        event=seldom(),
        local=not in_backward and seldom(),
        steps=draw.choice([2, 3]),
    )
    wire = program.hook != "comm" and seldom()  # drawn last: the others stay as they were
    return replace(program, wire=wire)


@dataclass
class _Made:
    """The model in training.

    Attributes:
        units: its blocks, in their order, and the model itself.
        act: ``forward``, ``backward`` or ``hook``: the next one raises.
    """

    model: nn.Module
    units: list[Any]
    batch: tuple[torch.Tensor, ...]
    loss: Callable[[torch.Tensor], torch.Tensor]
    act: list[str] = field(default_factory=list)


def small_config() -> LlamaConfig:
    """That of the programs' Llama."""
    return replace(SIZES["nano"], n_layers=3, dim=64, hidden_dim=96, vocab_size=128)


def _llama(program: Program, mesh: Any) -> _Made:
    ids = torch.arange(2 * 24).view(2, 24) % 128
    batch: tuple[torch.Tensor, ...] = (ids,)
    if program.cp > 1:
        batch = ids, torch.arange(24).expand(2, -1)
    if len(batch) > 1 or program.mesh[2] > 1 or program.recompute is not False or program.hfsdp:
        more = {"context_parallel": program.attention, "example": (batch, {})}
        model = parallel_llama(program, mesh, small_config(), **more)
    else:
        with torch.device("meta"):
            model = Llama(small_config())
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if program.offload else {}
        options |= {"mesh": mesh, "mp_policy": policy(program)}
        for layer in (*model.layers, model):
            fully_shard(layer, **options, reshard_after_forward=program.reshard)
    p3d.materialize(model, device="cpu", seed=1)
    batch = p3d.cp.shard_batch(batch, mesh)
    return _Made(model, [*model.layers, model], batch, lambda out: out.float().square().mean())


def _mixture(program: Program, mesh: Any) -> _Made:
    plan = {"layers.*.shared": "colwise_gather_output"} if program.mesh[2] > 1 else None
    model: Any = p3d.parallelize(
        Mixture(experts=8),
        mesh,
        plan,
        p3d.Sharding(shard_optimizer_over_replicate=program.hfsdp),
        mp_policy=policy(program),
        activation_checkpointing=program.recompute,
        checks=p3d.Checks(audit=False),
    )
    units = [*model.layers, model]
    return _Made(model, units, (batch(0),), lambda out: out.float().square().mean())


def _extended(program: Program, mesh: Any) -> _Made:
    model = extend(mlp(24), Bf16)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    width = next(model.parameters()).shape[1]
    units = [layer for layer in model if isinstance(layer, FSDPModule)]
    return _Made(model, [*units, model], (torch.randn(4, width),), lambda out: out.square().mean())


def _set_options(program: Program, made: _Made) -> None:
    model: Any = made.model
    layers = made.units[:-1]
    if program.inputs:
        model.set_reduce_scatter_max_input_buffers(program.inputs)
    if program.prefetch:
        for at, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 3])
            layer.set_modules_to_backward_prefetch(layers[max(at - 2, 0) : at][::-1])
    if program.forward_prefetch:
        model.set_forward_prefetch(True)
    if program.limit is not None:
        model.set_limit_all_gathers(program.limit)
    if program.hook == "comm":

        def hook(state: CommHookState, grad: torch.Tensor, output: Any = None) -> Any:
            work = reduce_scatter_hook(state, grad, output)
            if made.act == ["hook"]:
                raise Broken(made.act.pop())
            return work

        model.register_comm_hook(CommHookState(), hook)
    elif program.hook == "own":
        for unit in made.units:
            unit.set_custom_all_gather(_OwnGather())
        model.register_comm_hook(CommHookState(), _own_reduction)
    elif program.hook == "all_reduce":
        own = program.mesh[0] == 1 and dry_run.played is not None
        stream = torch.cuda.Stream() if own else None
        for unit in made.units:
            unit.set_all_reduce_hook(lambda tensor: tensor.mul_(0.5), stream=stream)
    elif program.hook == "sum":
        model.set_force_sum_reduction_for_comms(True)


class _OwnGather:
    """An all-gather of a user's, with a work."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


def _own_reduction(state: CommHookState, grad: torch.Tensor, output: Any = None) -> Any:
    """A communication hook of a user's, with a work."""
    if output is None:
        return dist.all_reduce(grad, group=state.process_group, async_op=True)
    return reduce_scatter_single(output, grad, group=state.process_group, async_op=True)


def train(program: Program) -> None:
    """Trains ``program.steps`` steps."""
    layout = p3d.MeshLayout(*program.mesh, cp=program.cp, ep=program.ep)
    mesh = p3d.build_mesh(layout, device_type="cpu")
    make = _extended if program.extended else _mixture if program.ep > 1 else _llama
    made = make(program, mesh)
    model: Any = made.model
    _set_options(program, made)
    model.set_static_memory(program.static)

    def middle(*_: Any) -> None:
        if made.act == ["forward"]:
            raise Broken(made.act.pop())

    def in_backward(grad: torch.Tensor) -> None:
        if made.act == ["backward"]:
            raise Broken(made.act.pop())

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(in_backward)

    if program.raises:  # tp refuses hooks that would see a part
        made.units[len(made.units) // 2].register_forward_pre_hook(middle)
        made.units[0].register_forward_hook(after)
    options: dict[str, Any] = {"lr": 1e-3, "capturable": program.capturable}
    if program.in_backward:
        optimizer: Any = p3d.optim.step_in_backward(model, torch.optim.AdamW, **options)
    elif program.local:
        optimizer = p3d.optim.local(torch.optim.AdamW, model.parameters(), **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    for step in range(program.steps):
        if program.raises and step == 1:
            made.act.append(program.raises)
            with suppress(Broken):
                made.loss(model(*made.batch)).backward()
            optimizer.zero_grad()
            torch.randn(8)  # in memory that the error has freed
        for number in range(program.micro):
            last = number == program.micro - 1
            model.set_requires_gradient_sync(program.sync or last)
            model.set_requires_all_reduce(program.all_reduce or last)
            made.loss(model(*made.batch)).backward()
        if program.clip:
            p3d.optim.clip_grad_norm_(model.parameters(), 1.0)
        if not program.in_backward:
            optimizer.step()
        if program.evaluates:
            with torch.no_grad():
                model(*made.batch)
                for param in model.parameters():
                    getattr(param, "_local_tensor", param).mul_(0.9)
        if program.event and dry_run.played is not None:
            model.set_post_optim_event(torch.cuda.current_stream().record_event())
        optimizer.zero_grad()
        if program.unshards:
            made.units[1].unshard(async_op=True)
