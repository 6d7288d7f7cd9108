"""Numbers of attention heads that ``tp`` doesn't divide: whole heads for every rank, as evenly as possible.

==================================== ====================================================================
key and value heads divide           nothing to do: ``torch.chunk`` cuts between heads
at least as many as ranks            each rank gets whole heads, the first ranks one more; the query heads
                                     go with the key and value head that they attend to
fewer, but enough query heads        key and value projections whole at rest; each rank computes the heads
                                     that its query heads attend to (``GroupedKv``)
fewer query heads than ranks, or     every rank computes the whole layer, its weights split at rest: right,
an unknown kind of layer             but not faster; a note of the plan says so
==================================== ====================================================================
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor, nn

from parallel3d._layout.heads import attended_heads, share_out
from parallel3d._layout.packing import Packing, cut_sections
from parallel3d.errors import PlanError
from parallel3d.tp.local_attributes import local_attributes, reads_of, width_attributes
from parallel3d.tp.resolve import (
    Attention,
    PlanSource,
    Projection,
    Resolution,
    Role,
    RuledModule,
    numberless,
)
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

# An attention layer and its numbers of heads are recognised by names and sizes, if all of them agree.

NUMBERS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_query_heads")
"""Names of attributes with the number of (query) heads ..."""
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
    """Yields the attention layers whose query, key and value projections are split
    (``Colwise(output="shard")``). ``ruled``: id of a module -> the module with its style; ``modules``: path
    -> module."""
    colwise: dict[str, list[Projection]] = {}  # by parent
    rowwise: dict[str, list[Projection]] = {}
    for one in ruled.values():
        # The base layer of a LoRA layer has its name.
        parent, _, name = one.name.removesuffix(".base_layer").rpartition(".")
        try:
            kind = linear_kind(one.style, one.module)
        except PlanError:
            continue
        if isinstance(one.style, Colwise) and one.style.output == "shard":
            made = Projection(one, _role(name), kind.out_features, kind.out_dim)
            colwise.setdefault(parent, []).append(made)
        elif isinstance(one.style, Rowwise) and one.style.input == "shard":
            made = Projection(one, "other", kind.in_features, kind.in_dim)
            rowwise.setdefault(parent, []).append(made)
    for parent, inputs in colwise.items():
        roles = {p.role for p in inputs}
        # Gemma 3n: some layers have queries only, and attend to the keys of an earlier layer.
        borrows = _own(modules[parent], GROUP_SIZES) is not None
        has_keys = bool(roles & {"key", "latent"}) or borrows
        if "fused" not in roles and not ("query" in roles and has_keys):
            continue
        # The output projection is beside the others, or in a module beside theirs, as in BERT.
        outputs = rowwise.get(parent, [])
        if not outputs and (outer := parent.rpartition(".")[0]):
            # Not one with a column-parallel linear beside it, such as an MLP's.
            near = [w for w in rowwise if w not in colwise and f"{w}.".startswith(f"{outer}.")]
            outputs = [p for where in near for p in rowwise[where]]
        yield _with_heads(Attention(parent, modules[parent], tuple(inputs), tuple(outputs)))


def _role(name: str) -> Role:
    words = set(re.split(r"[_\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    if "kv" in words and words & {"b", "up"}:
        return "latent"
    roles = [role for role, names in _ROLES if words & names]
    if len(roles) > 1 or {"c", "attn"} <= words:
        return "fused"
    return roles[0] if roles else "other"


def _with_heads(layer: Attention) -> Attention:
    """Returns ``layer`` with its numbers of heads, or with the reason (``why``) if they aren't known."""
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
    candidates = (*_numbers(layer.module, NUMBERS), *sizes)
    heads = next((n for n in candidates if n > 0 and may_be_heads(n)), None)
    if heads is None:
        why = f"no number of heads fits its sizes; looked for {', '.join(NUMBERS)}"
        return replace(layer, why=why)
    kv = _kv_heads(layer, heads, size)
    why = f"no number of key and value heads, to {heads} heads, fits its sizes"
    return replace(layer, heads=heads, kv_heads=kv, why=why if kv is None else "")


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
    # A fused projection has a key and a value for each head, and the queries unless they have their own.
    fused = [p.size // unit - (0 if query else heads) for p in layer.inputs if p.role == "fused"]
    sizes = [total // unit for total in keys] + [number // 2 for number in fused]
    candidates = (*_numbers(layer.module, KV_NUMBERS), *groups, *sizes)
    return next((n for n in candidates if n > 0 and may_be(n)), None)


def _own(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((n for name in names if type(n := getattr(module, name, None)) is int), None)


def _numbers(module: nn.Module, names: tuple[str, ...]) -> Iterator[int]:
    """Yields the int values of attributes ``names`` of the module, then those of its ``config``."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            try:
                value = getattr(owner, name, None)
            except Exception:  # transformers: a number that differs by layer
                continue
            if type(value) is int:
                yield value


def resolve(
    model: nn.Module, source: PlanSource, tp: int, *, strict: bool, tied: bool = True
) -> Resolution:
    """Resolves the rules of ``source`` against ``model`` for ``tp`` ranks, and changes styles so that every
    rank has whole attention heads. Errors are collected in the result's ``problems``. ``strict``: a rule that
    matches nothing is an error; ``tied``: modules tied to one with a split vocabulary get its style."""
    resolution = Resolution(model, tp)
    resolution.notes += source.notes
    resolution.add_plan(source, strict=strict)
    if tied:
        resolution.add_tied_embeddings()
    resolution.leave_fast_paths()
    for layer in find_attention(resolution.ruled, resolution.modules) if tp > 1 else ():
        resolution.attentions.append(layer)
        with suppress(PlanError):  # a style that doesn't fit its module: ``finish`` reports it
            _Alignment(resolution, layer).run()
    resolution.add_adapters()
    resolution.finish()
    return resolution


def _whole(style: Style) -> Style | None:
    """Returns what replaces ``style`` if every rank computes the whole attention layer, or None."""
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
    """Changes an attention layer's styles so that each rank has whole heads, or computes the whole layer."""

    def __init__(self, resolution: Resolution, layer: Attention) -> None:
        self.resolution, self.layer, self.tp = resolution, layer, resolution.tp
        # Unknown numbers are 0, which ``run`` handles before it uses them.
        self.heads, self.kv_heads = layer.heads or 0, layer.kv_heads or 0

    def run(self) -> None:
        layer, tp = self.layer, self.tp
        if any(isinstance(p.ruled.style.packed, Packing) for p in layer.projections):  # type: ignore[attr-defined]
            return  # the plan gives the rows of each rank
        if not (self.heads and self.kv_heads):
            if any(p.size % tp for p in layer.projections) or self.heads % tp:
                self.keep_whole(layer.why)
            return
        of_config = {f"config.{name}" for name in (*NUMBERS, *KV_NUMBERS)}
        unset = sorted((reads_of(layer.module) or frozenset()) & of_config)
        fused = [p for p in layer.inputs if p.role == "fused"]
        cut = [n for p in fused for n in self.sections(p) if n % self.kv_heads]
        if cut:
            self.keep_whole(f"{cut[0]} features can't be shared by {self.kv_heads} groups of heads")
        elif unset:
            self.keep_whole(f"its forward reads self.{unset[0]}, which all layers share")
        elif self.heads < tp or (fused and self.kv_heads < tp):
            self.keep_whole(
                f"{self.heads} heads ({self.kv_heads} of keys and values) are too few for {tp} ranks"
            )
        else:
            self.share()

    def share(self) -> None:
        """Splits the key and value heads among the ranks, each with its query heads; if there are too few of
        them, calls ``group_kv_heads``."""
        kv = share_out(self.kv_heads, self.tp)
        even, shared = self.kv_heads % self.tp == 0, self.kv_heads < self.tp
        try:
            if not even:
                # First, as it changes nothing if a parameter that is split has no part for each head.
                self.split_params(self.heads if shared else self.kv_heads)
        except PlanError as unfit:
            self.keep_whole(str(unfit))
            return
        if shared:
            self.group_kv_heads()
            return
        if not even:
            for p in self.layer.projections:
                self.split_heads(p, self.kv_heads)
            self.note(f"{self.kv_heads} groups of heads as {kv}")
        self.set_attributes([n * self.layer.group for n in kv], kv)

    def group_kv_heads(self) -> None:
        """For fewer key and value heads than ranks: splits the query heads among the ranks, and gives each
        rank copies of the key and value heads that its query heads attend to."""
        layer, tp = self.layer, self.tp
        attended = attended_heads(self.heads, self.kv_heads, tp)
        query, kv_heads, group = [len(heads) for heads in attended], attended, 1
        groups = {heads.count(head) for heads in attended for head in heads}
        if len(groups) == 1:  # alike on all ranks: the module's own repetition does it
            kv_heads = tuple(tuple(sorted(set(heads))) for heads in attended)
            group = groups.pop()
        for p in layer.projections:
            if p.role in ("key", "value"):
                style = p.ruled.style
                assert isinstance(style, Colwise)
                made = GroupedKv(
                    input=style.input,
                    sequence_dim=style.sequence_dim,
                    kv_heads=self.kv_heads,
                    heads=kv_heads,
                )
                self.resolution.ruled[id(p.ruled.module)] = replace(p.ruled, style=made)
            elif self.heads % tp:
                self.split_heads(p, self.heads)
        self.set_attributes(query, [len(heads) for heads in kv_heads], group)
        self.note(f"ranks share key and value heads: {self.kv_heads} for {self.heads} query heads")

    def keep_whole(self, why: str) -> None:
        """Changes the styles so that every rank computes all heads; adds a note with the reason."""
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
        """Returns (id, module with its style) of the layer, modules in it and its output projections."""
        name, outputs = self.layer.name, {id(p.ruled.module) for p in self.layer.outputs}
        return [
            (key, ruled)
            for key, ruled in self.resolution.ruled.items()
            if not name or f"{ruled.name}.".startswith(f"{name}.") or key in outputs
        ]

    def split_heads(self, p: Projection, heads: int) -> None:
        """Changes the style of projection ``p`` so that each rank has whole heads; ``heads`` is the number of
        heads, or of groups of heads that stay together."""
        sections = self.sections(p)
        if uneven := [n for n in sections if n % heads]:
            raise PlanError(
                f"{p.ruled.name!r}: {uneven[0]} features have no part for each of {heads} heads"
            )
        packing = cut_sections(p.dim, sections, self.tp, tuple(n // heads for n in sections))
        style = replace(p.ruled.style, packed=packing, multiple_of=1)  # type: ignore[call-arg]
        self.resolution.ruled[id(p.ruled.module)] = replace(p.ruled, style=style)

    def sections(self, p: Projection) -> tuple[int, ...]:
        """Returns the sizes of the sections of a projection's split features, as of a fused q, k and v."""
        style = p.ruled.style
        assert isinstance(style, (Colwise, Rowwise)) and not isinstance(style.packed, Packing)
        return sections_of(p.ruled.name, p.size, style.packed)

    def split_params(self, heads: int) -> None:
        """Changes the rules of the layer's own parameters that the plan splits, so that each rank has the
        values of its heads. Raises PlanError if a size isn't divisible by ``heads``."""

        def split(style: Style, param: Tensor | None) -> Style:
            if param is None or not isinstance(style, Colwise):
                return style
            dim = max(param.dim() - 2, 0)
            size, rest = divmod(param.shape[dim], heads)
            if rest:
                raise PlanError(f"a parameter of {tuple(param.shape)} has no part for each head")
            packing = cut_sections(dim, (param.shape[dim],), self.tp, size)
            return replace(style, packed=packing)

        for key, ruled in self.inside():
            if isinstance(ruled.style, LocalParams):
                own = ruled.module._parameters
                params = tuple((n, split(s, own[n])) for n, s in ruled.style.params)
                style = replace(ruled.style, params=params)
                self.resolution.ruled[key] = replace(ruled, style=style)

    def note(self, message: str) -> None:
        """Adds ``message`` about the layer to the notes of the plan's report, once for all layers of a
        model."""
        note = f"{numberless(self.layer.name)!r}: {message}"
        if note not in self.resolution.notes:
            self.resolution.notes.append(note)

    def set_attributes(
        self, heads: Sequence[int], kv: Sequence[int], group: int | None = None
    ) -> None:
        """Adds to the resolution's attributes those of the layer that depend on numbers of heads. ``heads``,
        ``kv``: numbers of query heads, and of key and value heads, on each rank; ``group``: query heads for
        each of the latter, if not as in the plain layer."""
        layer = self.layer
        named = {
            **dict.fromkeys(NUMBERS, (self.heads, heads)),
            **dict.fromkeys(KV_NUMBERS, (self.kv_heads, kv)),
            **dict.fromkeys(GROUP_SIZES, (layer.group, [group or layer.group] * self.tp)),
        }
        own = vars(layer.module)
        values = {n: tuple(local) for n, (whole, local) in named.items() if own.get(n) == whole}
        by_size = {self.kv_heads: tuple(kv), self.heads: tuple(heads)}
        for p in layer.projections:
            whole = layer.heads_of(p)
            local = kv if whole == self.kv_heads else heads
            for width in {p.size, *self.sections(p)}:
                by_size.setdefault(width, tuple(width // whole * number for number in local))
                for name in width_attributes(layer.module, width):
                    values.setdefault(name, by_size[width])
        # The attributes of a LocalSizes on the layer, which this replaces if it has a value for each.
        key = id(layer.module)
        ruled = self.resolution.ruled.get(key)
        if ruled is not None and isinstance(ruled.style, LocalSizes):
            names = ruled.style.names
            if all(own[name] in by_size for name in names):
                values.update({name: by_size[own[name]] for name in names})
                del self.resolution.ruled[key]
        self.resolution.attributes += local_attributes(layer.name, layer.module, values)
