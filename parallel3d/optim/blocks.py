"""BlockSteps: steps of torchao's optimizers, whose state is quantized in blocks, with the plain model's
results.

A block is some consecutive elements of the flattened parameter, with one scale. Which parameters have
quantized state, and where their blocks are, is decided by the whole parameter. A shard of whole blocks
(``fully_shard(block=...)``) is stepped on where it lies. A parameter whose blocks are divided between ranks
is all-gathered for its step; each rank then steps on some rows of it, and keeps the state of these rows.

State is shown as ordinary DTensors, which have the same shape on every mesh: ``exp_avg.scale``, one number a
block, and ``exp_avg.codes``, the bytes of its elements, in one more dim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from parallel3d._layout.packed import Box, PackedShard, gather_packed, packed_among, packed_boxes
from parallel3d._layout.packing import Packing
from parallel3d._torch.simulated import call_by_rank, simulation_off
from parallel3d._util import dry_run
from parallel3d.fsdp import chunk
from parallel3d.fsdp.layout import LEAST_QUANTIZED, block_rows
from parallel3d.optim.pieces import State, local_of, part_of, placed_as, reduced_grad

CODES, SCALE = ".codes", ".scale"
"""Ends of the names of what a quantized entry of a state consists of."""


@dataclass(frozen=True)
class BlockLayout:
    """How the scales and codes of a parameter's blocks lie on the ranks.

    Attributes:
        shape: the global shape of the scales: one number a block.
        placements: of scales and codes as DTensors.
        divided: whether some rank's shard has a part of a block. Then ``placements`` are not the parameter's:
            the ranks that shard it divide the first dim's rows of blocks.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    divided: bool


@lru_cache(maxsize=4096)
def block_layout(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    block: int,
) -> BlockLayout | None:
    """Returns the layout of the blocks, of ``block`` elements each, of a parameter of global ``shape``; None
    if torchao doesn't quantize its state (too small, or not divisible)."""
    found = None if math.prod(shape) < LEAST_QUANTIZED else block_rows(shape, block)
    if found is None:
        return None
    dim, rows = found
    blocks = (*shape[:dim], shape[dim] // rows, rows * math.prod(shape[dim + 1 :]) // block)
    same = tuple(_of_blocks(placement, dim, rows) for placement in placements)
    cuts = {
        axis: getattr(placement, "dim", 0)
        for axis, (size, placement) in enumerate(zip(mesh_shape, placements, strict=True))
        if size > 1 and not placement.is_replicate()
    }

    def is_whole(rank: tuple[int, ...]) -> bool:
        of_param = packed_boxes(shape, mesh_shape, rank, placements)[1]
        expected = [_rows_of_blocks(box, dim, rows) for box in of_param]
        of_blocks = packed_boxes(blocks, mesh_shape, rank, same)[1]
        return expected == [(box.offsets[:-1], box.sizes[:-1]) for box in of_blocks]

    if all(cut <= dim for cut in cuts.values()):
        ways = math.prod(mesh_shape[axis] for axis, cut in cuts.items() if cut == dim)
        packed = packed_among(placements)
        even = (packed is None or packed[1].dim != dim) and blocks[dim] % ways == 0
        # The boxes of thousands of ranks take long where several axes shard one dim.
        ranks = product(*(range(n if axis in cuts else 1) for axis, n in enumerate(mesh_shape)))
        if even or all(map(is_whole, ranks)):
            return BlockLayout(blocks, same, divided=False)
    by_rows = tuple(Shard(0) if axis in cuts else Replicate() for axis in range(len(mesh_shape)))
    return BlockLayout(blocks, by_rows, divided=True)


def _of_blocks(placement: Placement, dim: int, rows: int) -> Placement:
    """Returns the placement of scales for a parameter's ``placement`` along ``dim``, where a block covers
    ``rows`` of that dim; Replicate if it would divide a block."""
    if not isinstance(placement, PackedShard) or placement.dim != dim:
        return placement
    held = placement.packing.rows
    if any(first % rows or number % rows for rank in held for first, number in rank):
        return Replicate()  # which ``is_whole`` finds to be wrong
    scaled = tuple(
        tuple((first // rows, number // rows) for first, number in rank) for rank in held
    )
    return PackedShard(Packing(dim, scaled))


def _rows_of_blocks(box: Box, dim: int, rows: int) -> Any:
    """Returns (offsets, sizes) of ``box``, a part of a parameter, with those of ``dim`` divided by ``rows``,
    the rows of a block; None if the box divides a block."""
    ends = []
    for numbers in (box.offsets, box.sizes):
        quotient, rest = divmod(numbers[dim], rows)
        if rest:
            return None
        ends.append((*numbers[:dim], quotient))
    return tuple(ends)


class BlockSteps:
    """Makes the states of one of torchao's optimizers, and steps on parameters one by one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._block: int = optimizer.block_size
        self._examples: dict[Any, Any] = {}

    def add_states(self, group: dict[str, Any]) -> None:
        """Makes zero states for those of the group's parameters that have none."""
        for param in group["params"]:
            if param.requires_grad and not param.is_meta:
                self._state_of(group, param)

    def step(self, group: dict[str, Any], param: nn.Parameter, step: Callable[[Any], Any]) -> None:
        """Steps on one parameter, which has a gradient: calls ``step(optimizer)`` with this rank's whole
        blocks of it. Simulated ranks step one after another, as torchao's tensors can't be combined."""
        layout, state = self._layout_of(param), self._state_of(group, param)
        entries = {key: local_of(value) for key, value in state.items()}
        local, values, grad = local_of(param), local_of(param), reduced_grad(param, "Step")
        divided = layout if layout is not None and layout.divided else None
        if divided is not None:
            assert isinstance(param, DTensor)
            mesh, placements, shape = param.device_mesh, param.placements, param.shape
            rows = torch.Size((divided.shape[0], param.numel() // divided.shape[0]))
            wholes = (gather_packed(each, mesh, placements, shape) for each in (local, grad))
            values, grad = (
                local_of(chunk(whole.view(rows), mesh, divided.placements)) for whole in wholes
            )

        def on_rank(values: Any, grad: Any, options: Any, of_state: Any) -> None:
            own = dict(zip(entries, of_state, strict=True))
            self._step_once(dict(zip(group, options, strict=True)), values, grad, own, step)

        call_by_rank(on_rank, values, grad, tuple(group.values()), tuple(entries.values()))
        if divided is not None:
            whole = gather_packed(values, mesh, divided.placements, rows).view(shape)
            local.copy_(part_of(param, whole))

    def _step_once(
        self,
        group: dict[str, Any],
        values: torch.Tensor,
        grad: torch.Tensor,
        entries: State,
        step: Callable[[Any], Any],
    ) -> None:
        if not values.numel():
            entries["step"] += 1
            return
        # Flat and contiguous, which the local tensor of an uneven dim other than the first is not.
        piece = nn.Parameter(values.detach().reshape(-1))
        piece.grad = grad.reshape(-1)
        own: State = {"step": entries["step"]}
        copies = [(values, piece.detach())]
        for key in self._keys(group):
            if key in entries:
                own[key] = entries[key].reshape(-1)
                copies.append((entries[key], own[key]))
            else:
                own[key] = self._joined(key, piece, entries[key + CODES], entries[key + SCALE])
        optimizer, group["params"] = self.optimizer, [piece]
        groups, shown = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups, optimizer.state = [group], defaultdict(dict, {piece: own})
            step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, shown
        for whole, flat in copies:
            if not whole.is_contiguous():
                whole.copy_(flat.view(whole.shape))

    def _keys(self, group: dict[str, Any]) -> list[str]:
        return ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]

    def _layout_of(self, param: torch.Tensor) -> BlockLayout | None:
        """Returns the layout of the blocks of ``param``; None if its state isn't quantized."""
        if not isinstance(param, DTensor):
            return block_layout(tuple(param.shape), (), (), self._block)
        mesh = param.device_mesh
        return block_layout(tuple(param.shape), tuple(mesh.shape), param.placements, self._block)

    def _state_of(self, group: dict[str, Any], param: nn.Parameter) -> State:
        """Returns the entries of ``optimizer.state`` for ``param``, and makes them if there are none."""
        state: State = self.optimizer.state[param]
        if state:
            return state
        layout = self._layout_of(param)
        state["step"] = torch.zeros(())  # as torchao has it, one of each simulated rank
        for key in self._keys(group):
            if layout is None:
                state[key] = placed_as(param, torch.zeros_like(local_of(param)))
                continue
            codes = self._example(key, local_of(param)).codes.view(torch.uint8)
            number = torch.zeros((), device=param.device)  # expanded, it takes no memory
            for end, zero, shape in (
                (CODES, number.to(torch.uint8), (*layout.shape, codes.numel())),
                (SCALE, number, layout.shape),
            ):
                zeros = zero.expand(shape)
                if isinstance(param, DTensor):
                    state[key + end] = chunk(zeros, param.device_mesh, layout.placements)
                else:
                    state[key + end] = zeros.clone()
        return state

    def _example(self, key: str, like: torch.Tensor) -> Any:
        """Returns torchao's quantized tensor for one block of state ``key``, of the kind of ``like``."""
        kind = key == "exp_avg", like.dtype, like.device
        if kind not in self._examples:
            with dry_run.real():  # torchao computes its table of codes once
                self.optimizer._subclass_zeros(torch.zeros(self._block), kind[0], self._block)
            with simulation_off():
                one = torch.zeros(self._block, dtype=like.dtype, device=like.device)
                self._examples[kind] = self.optimizer._subclass_zeros(one, kind[0], self._block)
        return self._examples[kind]

    def _joined(
        self, key: str, piece: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """Returns torchao's quantized tensor like ``piece`` with these ``codes`` and ``scale``, no copy."""
        example = self._example(key, piece)
        names, context = example.__tensor_flatten__()
        inner = {name: getattr(example, name) for name in names}
        inner["codes"] = codes.view(-1).view(example.codes.dtype)
        inner["scale"] = scale.view(-1)
        # A 4-bit state has its shape there, as its codes have another.
        context = [piece.shape if isinstance(each, torch.Size) else each for each in context]
        return type(example).__tensor_unflatten__(inner, context, piece.shape, (1,))


def restore_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Puts the codes and scales of ``state_dict`` into the optimizer, which has just loaded it: torch has
    cast them to the parameters' dtype."""
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for group, saved in pairs:
        for param, number in zip(group["params"], saved["params"], strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if key.endswith((CODES, SCALE)):
                    optimizer.state[param][key] = value.clone()
