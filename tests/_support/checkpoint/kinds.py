"""Kinds of models whose parameters are no plain matter, and layouts for four ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from _support.checkpoint.dcp_models import Lm, loss_of, plain
from _support.models import LM_PLAN
from _support.packed_models import packed_plan, packed_tokens, uneven_lm
from parallel3d import MeshLayout, build_mesh, parallelize

LAYOUTS = {
    "fsdp": MeshLayout(shard=4),
    "hsdp": MeshLayout(replicate=2, shard=2),
    "tp": MeshLayout(tp=4),
    "fsdp + tp": MeshLayout(shard=2, tp=2),
}


def tied() -> Lm:
    model = plain(1, 8)
    model.head.weight = model.embed.weight
    return model


def frozen() -> Lm:
    model = plain(1, 8)
    model.embed.requires_grad_(False)
    model.layers[0].up.bias.requires_grad_(False)
    return model


def packed() -> nn.Module:
    torch.manual_seed(1)
    return uneven_lm()


MODELS: dict[str, Callable[[], Any]] = {
    "plain": partial(plain, 1, 8),
    "tied": tied,
    "frozen": frozen,
    "packed": packed,
}


def on_mesh(kind: str, layout: str | MeshLayout) -> nn.Module:
    model = MODELS[kind]()
    plan = packed_plan(model) if kind == "packed" else dict(LM_PLAN)
    if kind == "tied":
        del plan["head"]
    mesh = build_mesh(LAYOUTS[layout] if isinstance(layout, str) else layout, device_type="cpu")
    return parallelize(model, mesh, tp_plan=plan)


def advance(kind: str, model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    if kind == "packed":
        loss = model(packed_tokens(seed)).square().mean()
    else:
        loss = loss_of(model, seed)
    loss.backward()
    if not hasattr(optimizer, "remove"):  # steps in backward
        optimizer.step()
    optimizer.zero_grad()
