"""Sizes of attention layers that don't divide: whole heads for every rank, as evenly as can be.

==================================== ====================================================================
key and value heads divide           nothing to do: ``torch.chunk`` cuts between heads
at least as many as ranks            each rank gets whole heads, the first ranks one more; the query heads
                                     go with the key and value head that they attend to
fewer, but enough query heads        key and value projections whole at rest; each rank computes the heads
                                     its query heads attend to (``GroupedKv``)
fewer query heads than ranks, or     the whole layer on every rank, its weights split at rest: right, but
a layer that isn't understood        not faster; a note of the plan says so
==================================== ====================================================================
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from parallel3d._packing import Packing
from parallel3d.errors import PlanError
from parallel3d.tp._resolve import Resolution
from parallel3d.tp.attention import (
    GROUP_SIZES,
    KV_NUMBERS,
    NUMBERS,
    Attention,
    Projection,
    find_attention,
)
from parallel3d.tp.local_attributes import local_attributes, reads_of, width_attributes
from parallel3d.tp.patterns import numberless
from parallel3d.tp.styles import Colwise, LocalParams, Replicated, Rowwise, Style
from parallel3d.tp.styles.grouped_kv import GroupedKv
from parallel3d.tp.styles.sections import sections_of

__all__ = ["align_heads", "pack_heads", "share_out"]


def share_out(number: int, ranks: int) -> tuple[int, ...]:
    """How many of ``number`` each rank gets: as many, the first ranks one more."""
    return tuple(number // ranks + (rank < number % ranks) for rank in range(ranks))


def pack_heads(dim: int, sections: tuple[int, ...], heads: tuple[int, ...]) -> Packing:
    """The packing of a ``dim`` packed of ``sections``, of each of which a rank holds so many heads."""
    rows: list[list[tuple[int, int]]] = [[] for _ in heads]
    at = 0
    for section in sections:
        unit = section // sum(heads)
        for held, number in zip(rows, heads, strict=True):
            if number:
                held.append((at, number * unit))
            at += number * unit
    return Packing(dim, tuple(tuple(held) for held in rows))


def align_heads(resolution: Resolution) -> None:
    """Changes the styles of attention layers so that no head is cut, and plans their attributes."""
    if resolution.tp == 1:
        return
    for layer in find_attention(resolution.ruled, resolution.modules):
        with suppress(PlanError):  # of a style that doesn't fit its module: rules() says so
            _Alignment(resolution, layer).run()


class _Alignment:
    """One attention layer being fitted to the ranks."""

    def __init__(self, resolution: Resolution, layer: Attention) -> None:
        self.resolution, self.layer, self.tp = resolution, layer, resolution.tp

    def run(self) -> None:
        layer, tp = self.layer, self.tp
        reads = reads_of(layer.module)
        if any(isinstance(p.ruled.style.packed, Packing) for p in layer.projections):  # type: ignore[attr-defined]
            return  # the plan says it all
        if layer.heads is None or layer.kv_heads is None:
            if any(p.size % tp for p in layer.projections) or (layer.heads or 0) % tp:
                self.keep_whole(layer.why)
            return
        of_config = [f"config.{name}" for name in (*NUMBERS, *KV_NUMBERS)]
        unset = sorted(reads & set(of_config)) if reads is not None else []
        fused = [p for p in layer.inputs if p.role == "fused"]
        cut = [n for p in fused for n in self.sections(p) if n % layer.kv_heads]
        if cut:
            self.keep_whole(
                f"{cut[0]} features can't be shared by {layer.kv_heads} groups of heads"
            )
        elif unset:
            self.keep_whole(f"its forward reads self.{unset[0]}, which all layers share")
        elif layer.kv_heads >= tp:
            kv = share_out(layer.kv_heads, tp)
            if layer.kv_heads % tp:
                self.follow_kv_heads(kv)
            self.set_attributes([n * layer.group for n in kv], kv)
        elif layer.heads >= tp and not fused:
            self.group_kv_heads()
        else:
            self.keep_whole(
                f"{layer.heads} heads ({layer.kv_heads} of keys and values) are too few for {tp} ranks"
            )

    def follow_kv_heads(self, kv: tuple[int, ...]) -> None:
        """Whole groups of heads for each rank."""
        for p in self.layer.projections:
            self.give(p, kv)
        self.give_raw(kv)
        self.note(f"{self.layer.kv_heads} groups of heads as {kv}")

    def group_kv_heads(self) -> None:
        """Query heads as evenly as can be; each rank with the key and value heads that they need."""
        layer, tp = self.layer, self.tp
        assert layer.heads is not None and layer.kv_heads is not None
        mine = share_out(layer.heads, tp)
        ends = [sum(mine[: rank + 1]) for rank in range(tp)]
        # [rank][local query head] -> the key and value head it attends to
        wanted = [
            [head // layer.group for head in range(end - number, end)]
            for end, number in zip(ends, mine, strict=True)
        ]
        each = [sorted(set(heads)) for heads in wanted]
        groups = {heads.count(head) for heads, kv in zip(wanted, each, strict=True) for head in kv}
        if len(groups) == 1:  # alike on all ranks: the module's own repetition does it
            read, group = each, groups.pop()
        else:
            read, group = wanted, 1
        for p in layer.projections:
            if p.role in ("key", "value"):
                style = p.ruled.style
                assert isinstance(style, Colwise)
                made = GroupedKv(
                    input=style.input,
                    sequence_dim=style.sequence_dim,
                    kv_heads=layer.kv_heads,
                    heads=tuple(map(tuple, read)),
                )
                self.put(p, made)
            elif layer.heads % tp:
                self.give(p, mine)
        if layer.heads % tp:
            self.give_raw(mine)
        self.set_attributes(mine, [len(heads) for heads in read], group)
        self.note(
            f"ranks share key and value heads: {layer.kv_heads} for {layer.heads} query heads"
        )

    def keep_whole(self, why: str) -> None:
        """Every rank computes the whole layer."""
        for p in self.layer.inputs:
            self.put(p, replace(p.ruled.style, output="replicate"))  # type: ignore[call-arg]
        for p in self.layer.outputs:
            self.put(p, replace(p.ruled.style, input="replicate"))  # type: ignore[call-arg]
        inside = f"{self.layer.name}." if self.layer.name else ""
        for key, ruled in self.resolution.ruled.items():
            if ruled.name.startswith(inside) and ruled.style == Replicated("partial"):
                self.resolution.ruled[key] = replace(ruled, style=Replicated())
        self.put_raw(lambda style, param: None)
        self.note(f"every rank computes the whole layer: {why}")

    def give(self, p: Projection, heads: tuple[int, ...]) -> None:
        """Gives a projection's ranks so many heads, or groups of heads, each."""
        packing = pack_heads(p.dim, self.sections(p), heads)
        self.put(p, replace(p.ruled.style, packed=packing, multiple_of=1))  # type: ignore[call-arg]

    def sections(self, p: Projection) -> tuple[int, ...]:
        """Sizes of what a projection's features are packed of."""
        style = p.ruled.style
        assert isinstance(style, (Colwise, Rowwise)) and not isinstance(style.packed, Packing)
        return sections_of(p.ruled.name, p.size, style.packed)

    def give_raw(self, heads: tuple[int, ...]) -> None:
        """Gives each rank so many heads' part of the layer's own parameters that the plan splits."""

        def fit(style: Style, param: Tensor) -> Style | None:
            dim = max(param.dim() - 2, 0)
            if not isinstance(style, Colwise) or param.shape[dim] % sum(heads):
                return style
            return replace(style, packed=pack_heads(dim, (param.shape[dim],), heads))

        self.put_raw(fit)

    def put_raw(self, fit: Callable[[Style, Tensor], Style | None]) -> None:
        """Changes the rules of the layer's own parameters; None: whole, with whole gradients."""
        module = self.layer.module
        ruled = self.resolution.ruled.get(id(module))
        if ruled is None or not isinstance(ruled.style, LocalParams):
            return
        old, params = dict(ruled.style.params), module._parameters
        new = {n: fit(style, param) for n, style in old.items() if (param := params[n]) is not None}
        kept = tuple((name, style) for name, style in new.items() if style is not None)
        grad = ruled.style.tp_grad if kept else "whole"
        style = replace(ruled.style, params=kept, tp_grad=grad)
        self.resolution.ruled[id(module)] = replace(ruled, style=style)

    def put(self, p: Projection, style: Style) -> None:
        self.resolution.ruled[p.key] = replace(p.ruled, style=style)

    def note(self, said: str) -> None:
        note = f"{numberless(self.layer.name)!r}: {said}"
        if note not in self.resolution.notes:  # once for all layers
            self.resolution.notes.append(note)

    def set_attributes(
        self, heads: Sequence[int], kv: Sequence[int], group: int | None = None
    ) -> None:
        """Plans the values of the module's attributes on ranks of so many heads."""
        layer = self.layer
        assert layer.heads is not None and layer.kv_heads is not None
        named = {
            **dict.fromkeys(NUMBERS, (layer.heads, heads)),
            **dict.fromkeys(KV_NUMBERS, (layer.kv_heads, kv)),
            **dict.fromkeys(GROUP_SIZES, (layer.group, [group or layer.group] * self.tp)),
        }
        own = vars(layer.module)
        values = {n: tuple(local) for n, (whole, local) in named.items() if own.get(n) == whole}
        for p in layer.projections:
            whole = layer.heads_of(p)
            local = kv if whole == layer.kv_heads else heads
            for width in {p.size, *self.sections(p)}:
                widths = tuple(width // whole * number for number in local)
                for name in width_attributes(layer.module, width):
                    values.setdefault(name, widths)
        self.resolution.attributes += local_attributes(layer.name, layer.module, values)
