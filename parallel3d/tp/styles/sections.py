"""Cutting the features of a weight among ``tp`` ranks: all alike, or each of the sections it is packed of."""

from dataclasses import replace

from torch.distributed.tensor import Shard

from parallel3d._packing import Packing, cut_sections
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, check_count

__all__ = ["Packed", "cut_features", "sections_of"]

Packed = int | tuple[int, ...] | Packing
"""How features are packed: so many equal sections, sections of these sizes, or these rows on each rank."""


def cut_features(
    what: str, size: int, dim: int, packed: Packed, multiple_of: int | tuple[int, ...], tp: int
) -> ParamRule:
    """The rule of a weight whose dim ``dim``, ``size`` features called ``what``, is cut among ``tp`` ranks.

    Sections are cut as ``torch.chunk`` cuts, so that what reads their product (the down projection after gate
    and up) is cut alike without being packed. Where that would cut a group of ``multiple_of``, ranks get
    whole groups, the first ranks one more.

    Raises:
        PlanError: the sections don't make up ``size``, or aren't made of whole groups.
    """
    if isinstance(packed, Packing):
        if len(packed.rows) != tp or packed.size != size:
            raise PlanError(
                f"the packing has {packed.size} rows on {len(packed.rows)} ranks, but {what} is {size} and "
                f"tp is {tp}"
            )
        return ParamRule(Shard(dim), packing=replace(packed, dim=dim))
    sections = sections_of(what, size, packed)
    groups = multiple_of if isinstance(multiple_of, tuple) else (multiple_of,) * len(sections)
    if len(groups) != len(sections):
        raise PlanError(
            f"multiple_of={multiple_of!r} is for {len(groups)} sections; packed={packed!r} has "
            f"{len(sections)}"
        )
    for index, (section, group) in enumerate(zip(sections, groups, strict=True)):
        name = what if len(sections) == 1 else f"section {index} of {what}"
        check_count(name, section, group)
    if any(
        group > 1 and section % (group * tp)
        for section, group in zip(sections, groups, strict=True)
    ):
        # Chunks would cut a group.
        return ParamRule(Shard(dim), packing=cut_sections(dim, sections, tp, groups))
    if len(sections) == 1:
        return ParamRule(Shard(dim))
    rows = []
    for rank in range(tp):
        at, held = 0, []
        for section in sections:
            chunk = -(-section // tp)
            first = min(rank * chunk, section)
            number = min(chunk, section - first)
            if number:
                held.append((at + first, number))
            at += section
        rows.append(tuple(held))
    return ParamRule(Shard(dim), packing=Packing(dim, tuple(rows)))


def sections_of(what: str, size: int, packed: int | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(packed, int):
        if packed < 1 or size % packed:
            raise PlanError(f"{what} {size} is not {packed} equal sections")
        return (size // packed,) * packed
    if not packed or any(type(n) is not int or n < 1 for n in packed) or sum(packed) != size:
        raise PlanError(
            f"packed={packed!r}: the sections of {what} must be positive and add up to {size}"
        )
    return packed
