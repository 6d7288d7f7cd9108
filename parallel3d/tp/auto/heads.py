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

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor, nn

from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError
from parallel3d.tp.local_attributes import local_attributes, reads_of, width_attributes
from parallel3d.tp.resolve import Attention, Projection, Resolution, Role, RuledModule, numberless
from parallel3d.tp.styles import (
    Colwise,
    LocalParams,
    LocalSizes,
    PrepareInput,
    Replicated,
    RopeOutput,
    Rowwise,
    Style,
)
from parallel3d.tp.styles.base import linear_kind
from parallel3d.tp.styles.linear import GroupedKv, sections_of

# Recognising an attention layer among the modules a plan splits: its projections and its numbers
# of heads.
#
# Read off names and sizes only, and believed only where all of them agree.

NUMBERS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_query_heads")
"""Names attributes have that hold the number of (query) heads ..."""
KV_NUMBERS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""... of key and value heads ..."""
GROUP_SIZES = ("num_key_value_groups", "num_queries_per_kv", "num_kv_groups", "n_rep")
"""... of query heads that attend to the same key and value head ..."""
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
"""... and the size of a head."""


_ROLES: tuple[tuple[Role, set[str]], ...] = (
    ("query", {"q", "wq", "query", "queries", "qproj"}),
    ("key", {"k", "wk", "key", "keys", "kproj"}),
    ("value", {"v", "wv", "value", "values", "vproj"}),
    ("fused", {"qkv", "wqkv", "kv", "wkv"}),
)


def find_attention(
    ruled: dict[int, RuledModule], modules: dict[str, nn.Module]
) -> Iterator[Attention]:
    """The attention layers in which linears have Colwise with ``output="shard"``.

    Args:
        ruled: as in ``Resolution.ruled``.
        modules: all of the model's, by path.
    """
    parents: dict[str, list[Projection]] = {}
    rowwise: dict[str, list[Projection]] = {}  # parent -> those in it
    for key, found in ruled.items():
        parent, _, name = found.name.rpartition(".")
        try:
            kind = linear_kind(found.style, found.module)
        except PlanError:
            continue
        if isinstance(found.style, Colwise) and found.style.output == "shard":
            made = Projection(key, found, _role(name), kind.out_features, kind.out_dim)
            parents.setdefault(parent, []).append(made)
        elif isinstance(found.style, Rowwise) and found.style.input == "shard":
            made = Projection(key, found, "other", kind.in_features, kind.in_dim)
            rowwise.setdefault(parent, []).append(made)
    for parent, inputs in parents.items():
        roles = {p.role for p in inputs}
        # Gemma 3n: some layers have queries only, and attend to the keys of an earlier layer.
        borrows = _own(modules[parent], GROUP_SIZES) is not None
        has_keys = bool(roles & {"key", "latent"}) or borrows
        if "fused" not in roles and not ("query" in roles and has_keys):
            continue
        # Beside the others, or as BERT has it, in a module beside theirs.
        outputs = rowwise.get(parent, [])
        if not outputs and (outer := parent.rpartition(".")[0]):
            # Not one with a column-parallel linear beside it, such as an MLP's.
            free = [where for where in rowwise if where not in parents]
            near = [where for where in free if f"{where}.".startswith(f"{outer}.")]
            outputs = [p for where in near for p in rowwise[where]]
        layer = Attention(parent, modules[parent], tuple(inputs), tuple(outputs))
        yield _with_heads(layer)


def _role(name: str) -> Role:
    words = set(re.split(r"[_\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    if "kv" in words and words & {"b", "up"}:
        return "latent"
    found = [role for role, names in _ROLES if words & names]
    if len(found) > 1 or {"c", "attn"} <= words:
        return "fused"
    return found[0] if found else "other"


def _with_heads(layer: Attention) -> Attention:
    """The layer with its numbers of heads, or with why they aren't known."""
    if not layer.outputs:
        return replace(layer, why="no linear split by its input features follows it")
    size = _own(layer.module, HEAD_SIZES)
    wide = [p.size for p in layer.projections if p.role in ("query", "latent", "other")]
    query = [p.size for p in layer.inputs if p.role == "query"]

    def may_be_heads(n: int) -> bool:
        # Twice the size: with a gate beside each query.
        sized = not size or all(total in (n * size, 2 * n * size) for total in query)
        return all(total % n == 0 for total in wide) and sized

    sizes = [] if not size else [p.size // size for p in (*layer.outputs, *layer.inputs)]
    named = _numbers(layer.module, NUMBERS)
    heads = next((n for n in (*named, *sizes) if n > 0 and may_be_heads(n)), None)
    if heads is None:
        said = f"no number of heads fits its sizes; looked for {', '.join(NUMBERS)}"
        return replace(layer, why=said)
    kv = _kv_heads(layer, heads, size)
    if kv is None:
        said = f"no number of key and value heads, to {heads} heads, fits its sizes"
        return replace(layer, heads=heads, why=said)
    return replace(layer, heads=heads, kv_heads=kv)


def _kv_heads(layer: Attention, heads: int, size: int | None) -> int | None:
    keys = [p.size for p in layer.inputs if p.role == "key"]
    shared = [p.size for p in layer.inputs if p.role in ("key", "value", "fused")]
    if not shared:
        latent = any(p.role == "latent" for p in layer.inputs)
        group = None if latent else _own(layer.module, GROUP_SIZES)
        return heads // group if group else heads

    def may_be(n: int) -> bool:
        sized = not size or all(total == n * size for total in keys)
        return heads % n == 0 and all(total % n == 0 for total in shared) and sized

    groups = [heads // n for n in _numbers(layer.module, GROUP_SIZES) if n > 0]
    query = [p.size for p in layer.inputs if p.role == "query"]
    unit = size or (query or [p.size for p in layer.outputs])[0] // heads
    # What is fused has a key and a value for each head, and the queries unless they come apart.
    fused = [p.size // unit - (0 if query else heads) for p in layer.inputs if p.role == "fused"]
    sizes = [total // unit for total in keys] + [number // 2 for number in fused]
    candidates = (*_numbers(layer.module, KV_NUMBERS), *groups, *sizes)
    return next((n for n in candidates if n > 0 and may_be(n)), None)


def _own(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((n for name in names if type(n := getattr(module, name, None)) is int), None)


def _numbers(module: nn.Module, names: tuple[str, ...]) -> Iterator[int]:
    """The numbers under one of ``names``: the module's own, then its config's."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            try:
                value = getattr(owner, name, None)
            except Exception:  # transformers: a number that is another in other layers
                continue
            if type(value) is int:
                yield value


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
        resolution.attentions.append(layer)
        with suppress(PlanError):  # of a style that doesn't fit its module: rules() says so
            _Alignment(resolution, layer).run()


class _Unfit(Exception):
    """Something in a layer can't be cut between heads."""


def _whole(style: Style) -> Style | None:
    """What a style is in a layer that every rank computes whole; None: nothing is."""
    if isinstance(style, Colwise):
        return replace(style, output="replicate")
    if isinstance(style, Rowwise):
        return replace(style, input="replicate")
    if isinstance(style, LocalParams):
        return replace(style, params=tuple((name, Replicated()) for name, _ in style.params))
    if isinstance(style, (Replicated, RopeOutput)):
        return Replicated()
    return style if isinstance(style, PrepareInput) else None


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
        elif layer.heads < tp or (fused and layer.kv_heads < tp):
            self.keep_whole(
                f"{layer.heads} heads ({layer.kv_heads} of keys and values) are too few for {tp} ranks"
            )
        else:
            self.share()

    def share(self) -> None:
        """Whole heads for each rank."""
        layer, tp = self.layer, self.tp
        assert layer.heads is not None and layer.kv_heads is not None
        kv = share_out(layer.kv_heads, tp)
        try:
            if layer.kv_heads % tp:
                # Before anything changes: whether all that is split has a part for each head.
                self.give_raw(share_out(layer.heads, tp) if layer.kv_heads < tp else kv)
        except _Unfit as unfit:
            self.keep_whole(str(unfit))
            return
        if layer.kv_heads < tp:
            self.group_kv_heads()
            return
        if layer.kv_heads % tp:
            self.follow_kv_heads(kv)
        self.set_attributes([n * layer.group for n in kv], kv)

    def follow_kv_heads(self, kv: tuple[int, ...]) -> None:
        """Whole groups of heads for each rank."""
        for p in self.layer.projections:
            self.give(p, kv)
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
        self.set_attributes(mine, [len(heads) for heads in read], group)
        self.note(
            f"ranks share key and value heads: {layer.kv_heads} for {layer.heads} query heads"
        )

    def keep_whole(self, why: str) -> None:
        """Every rank computes the whole layer."""
        for key, ruled in self.inside():
            style = _whole(ruled.style)
            if style is not None:
                self.resolution.ruled[key] = replace(ruled, style=style)
            elif isinstance(ruled.style, LocalSizes):
                del self.resolution.ruled[key]
            else:
                self.resolution.problems.append(
                    f"{self.layer.name!r} can't be shared by {self.tp} ranks ({why}), nor computed whole "
                    f"on each: {ruled.name!r} has the style {ruled.style}"
                )
        self.note(f"every rank computes the whole layer: {why}")

    def inside(self) -> list[tuple[int, RuledModule]]:
        """The modules with a style in the layer, the layer itself among them."""
        name, outputs = self.layer.name, {p.key for p in self.layer.outputs}
        return [
            (key, ruled)
            for key, ruled in self.resolution.ruled.items()
            if name in ("", ruled.name) or ruled.name.startswith(f"{name}.") or key in outputs
        ]

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
        """Gives each rank so many heads' part of the parameters in the layer that the plan splits."""
        for key, ruled in self.inside():
            if isinstance(ruled.style, LocalParams):
                own = ruled.module._parameters
                params = tuple((n, self.fit(s, own[n], heads)) for n, s in ruled.style.params)
                self.resolution.ruled[key] = replace(
                    ruled, style=replace(ruled.style, params=params)
                )

    def fit(self, style: Style, param: Tensor | None, heads: tuple[int, ...]) -> Style:
        """The style of a parameter that has a part for each head."""
        if param is None or not isinstance(style, Colwise):
            return style
        dim = max(param.dim() - 2, 0)
        if param.shape[dim] % sum(heads):
            raise _Unfit(f"a parameter of {tuple(param.shape)} has no part for each head")
        return replace(style, packed=pack_heads(dim, (param.shape[dim],), heads))

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
        by_size = {layer.kv_heads: tuple(kv), layer.heads: tuple(heads)}
        for p in layer.projections:
            whole = layer.heads_of(p)
            local = kv if whole == layer.kv_heads else heads
            for width in {p.size, *self.sections(p)}:
                by_size.setdefault(width, tuple(width // whole * number for number in local))
                for name in width_attributes(layer.module, width):
                    values.setdefault(name, by_size[width])
        self.take_sizes(values, by_size)
        self.resolution.attributes += local_attributes(layer.name, layer.module, values)

    def take_sizes(
        self, values: dict[str, tuple[int, ...]], by_size: dict[int, tuple[int, ...]]
    ) -> None:
        """Adds the attributes that a :class:`LocalSizes` on the layer names, in its place."""
        key, own = id(self.layer.module), vars(self.layer.module)
        ruled = self.resolution.ruled.get(key)
        if ruled is None or not isinstance(ruled.style, LocalSizes):
            return
        found = {name: by_size[own[name]] for name in ruled.style.names if own[name] in by_size}
        if len(found) == len(ruled.style.names):
            values.update(found)
            del self.resolution.ruled[key]
