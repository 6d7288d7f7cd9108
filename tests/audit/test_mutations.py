"""Mutations of the engine, of tensor parallelism and of context parallelism: each is found.

A mutation is a function of ours whose result is changed: (where it is, on which mesh it runs) x (how).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from _support.audit.models import PLAN, Net, cut, loss_of, made
from torch import Tensor

import parallel3d as p3d
from parallel3d import AuditError, MeshLayout
from parallel3d._util.trees import map_tensors
from parallel3d.cp import collectives as over_cp
from parallel3d.fsdp import reduction
from parallel3d.fsdp.inspect import Bucket
from parallel3d.testing import GlooPool
from parallel3d.tp import collectives as over_tp

attending = import_module("parallel3d.cp.attention")  # as a name of the package it is the function


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def one_entry(x: Tensor) -> Tensor:
    y = x.clone().flatten()
    y[y.abs().argmax()] *= 1.001
    return y.view_as(x)


HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda x: x * 2,
    "half": lambda x: x / 2,
    "zero": lambda x: x * 0,
    "minus": lambda x: -x,
    "rounded": rounded,
    "moved": lambda x: x.flatten().roll(1).view_as(x),
    "one entry": one_entry,
}

FSDP, HSDP = (MeshLayout(1, 4), {}), (MeshLayout(2, 2), {})
TP = MeshLayout(1, 2, tp=2), {"tp_plan": PLAN}
ULYSSES, GATHER, RING = (
    (MeshLayout(1, 2, cp=2), {"context_parallel": kind}) for kind in ("ulysses", "gather", "ring")
)

# name -> (owner, attribute, mesh and options, what of it is changed)
WHERE: dict[str, tuple[Any, str, tuple[MeshLayout, dict[str, Any]], str]] = {
    "reduce-scatter": (reduction.ReduceScatter, "finish", FSDP, "job"),
    "reduce-scatter of HSDP": (reduction.ReduceScatter, "finish", HSDP, "job"),
    "sum over replicate": (reduction.AllReduce, "finish", HSDP, "job"),
    "what is gathered": (Bucket, "copy_out", FSDP, "unsharded"),
    "what is gathered beside tp": (Bucket, "copy_out", TP, "unsharded"),
    "tp in forward": (over_tp._OPERATIONS, "reduce_in_place", TP, "in place"),
    "tp in backward": (over_tp._Collective, "backward", TP, "tensors"),
    "to heads": (over_cp._OPERATIONS, "to_heads", ULYSSES, "tensors"),
    "to positions": (over_cp._OPERATIONS, "to_positions", ULYSSES, "tensors"),
    "gathered attention": (attending, "attend", GATHER, "tensors"),
    "attention of heads": (attending, "scaled_dot_product_attention", ULYSSES, "tensors"),
    "a message of the ring": (attending, "Rotation", RING, "rotation"),
    "gradients over cp": (over_cp._AcrossRanks, "backward", GATHER, "tensors"),
    "gradients of heads": (over_cp._AcrossRanks, "backward", ULYSSES, "tensors"),
}

# Twice minus: both ways of Ulysses' backward are changed.
EQUAL = {("gradients of heads", "minus")}


@contextmanager
def mutated(where: str, how: str) -> Iterator[list[int]]:
    """Within it the function changes its result; the list has one entry for each call."""
    owner, name, _, what = WHERE[where]
    change = HOW[how]
    in_table = isinstance(owner, dict)
    inner = owner[name][0] if in_table else getattr(owner, name)
    static = isinstance(owner, type) and isinstance(owner.__dict__[name], staticmethod)

    def put(function: Any) -> None:
        if in_table:
            owner[name] = (function, *owner[name][1:])
        else:
            setattr(owner, name, staticmethod(function) if static else function)

    calls: list[int] = []

    def float_only(t: Tensor) -> Tensor:
        return change(t) if t.is_floating_point() else t

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        result = inner(*args, **kwargs)
        with torch.no_grad():
            if what == "job":
                job = args[1]
                if job.tensor is not None:
                    job.tensor = change(job.tensor)
            elif what == "unsharded":
                for param in args[0].precision.compute_params:
                    if param.dim() > 1:
                        param.data.copy_(change(param.data.clone()))
            elif what == "in place":
                result.copy_(change(result.clone()))
            elif what == "rotation":
                wait = result.wait
                result.wait = lambda: change(wait())
        return map_tensors(float_only, result) if what == "tensors" else result

    put(run)
    try:
        yield calls
    finally:
        put(inner)


def found(where: str) -> dict[str, str]:
    """How it is changed -> the first line of the error; "": none; "not reached": it was not called."""
    layout, options = WHERE[where][2]
    mesh = p3d.build_mesh(layout, device_type="cpu")
    lines = {}
    for how in HOW:
        if (where, how) in EQUAL:
            continue
        torch.manual_seed(0)
        model = made(mesh, lambda: Net().double(), **options)
        batch = cut(mesh, seed=layout.data_rank(torch.distributed.get_rank()))
        lines[how] = ""
        with mutated(where, how) as calls:
            try:
                loss_of(model, batch).backward()
            except AuditError as error:
                lines[how] = str(error).splitlines()[0]
            if not calls:
                lines[how] = "not reached"
    return lines


@pytest.mark.parametrize("where", WHERE)
def test_each_is_found(gloo_pool: GlooPool, where: str) -> None:
    first, *others = gloo_pool.run(found, where, world_size=4)
    assert all(first.values()) and "not reached" not in first.values(), first
    assert all(other.keys() == first.keys() and all(other.values()) for other in others)
    if where in ("reduce-scatter", "sum over replicate"):
        assert "2 times the plain one" in first["twice"] and "0.5 times" in first["half"]
        assert "-1 times" in first["minus"]


def test_there_are_about_a_hundred() -> None:
    assert len(WHERE) * len(HOW) - len(EQUAL) >= 97


def right(seeds: list[int]) -> None:
    """Without a mutation none is blamed."""
    for layout, options in (FSDP, HSDP, TP, ULYSSES, GATHER, RING):
        mesh = p3d.build_mesh(layout, device_type="cpu")
        for seed in seeds:
            model = made(mesh, lambda: Net().double(), **options)
            loss_of(
                model, cut(mesh, seed=seed + layout.data_rank(torch.distributed.get_rank()))
            ).backward()


def test_the_engine_itself_is_not_blamed(gloo_pool: GlooPool) -> None:
    gloo_pool.run(right, [0, 1], world_size=4)
