"""Recognising an attention layer among the modules a plan splits: its projections and its numbers of heads.

Read off names and sizes only, and believed only where all of them agree.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp._resolve import RuledModule
from parallel3d.tp.styles import Colwise, Rowwise
from parallel3d.tp.styles.kinds import linear_kind

__all__ = [
    "GROUP_SIZES",
    "HEAD_SIZES",
    "KV_NUMBERS",
    "NUMBERS",
    "Attention",
    "Projection",
    "find_attention",
]

NUMBERS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_query_heads")
"""Names attributes have that hold the number of (query) heads ..."""
KV_NUMBERS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""... of key and value heads ..."""
GROUP_SIZES = ("num_key_value_groups", "num_queries_per_kv", "num_kv_groups", "n_rep")
"""... of query heads that attend to the same key and value head ..."""
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
"""... and the size of a head."""

Role = Literal["query", "key", "value", "fused", "latent", "other"]

_ROLES: tuple[tuple[Role, set[str]], ...] = (
    ("query", {"q", "wq", "query", "queries", "qproj"}),
    ("key", {"k", "wk", "key", "keys", "kproj"}),
    ("value", {"v", "wv", "value", "values", "vproj"}),
    ("fused", {"qkv", "wqkv", "kv", "wkv"}),
)


@dataclass(frozen=True)
class Projection:
    """A linear of an attention layer that the plan splits.

    Attributes:
        key: of its module in ``Resolution.ruled``.
        ruled: the module and its style.
        role: what it makes; ``"fused"``: of several kinds; ``"latent"``: keys and values for each query
            head, as DeepSeek's kv_b_proj.
        size: how many of its features the plan splits.
        dim: of its weight that they are.
    """

    key: int
    ruled: RuledModule
    role: Role
    size: int
    dim: int


@dataclass(frozen=True)
class Attention:
    """An attention layer whose heads the plan splits.

    Attributes:
        name: its path.
        module: that holds the projections.
        inputs: projections split by output features: query, key, value and others, such as gates.
        outputs: those split by input features.
        heads, kv_heads: numbers of heads; None: they could not be found out, ``why`` says why.
    """

    name: str
    module: nn.Module
    inputs: tuple[Projection, ...]
    outputs: tuple[Projection, ...]
    heads: int | None = None
    kv_heads: int | None = None
    why: str = ""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs + self.outputs

    @property
    def group(self) -> int:
        """Query heads that attend to the same key and value head."""
        assert self.heads is not None and self.kv_heads is not None
        return self.heads // self.kv_heads

    def heads_of(self, projection: Projection) -> int:
        """How many heads a projection has a part for."""
        assert self.heads is not None and self.kv_heads is not None
        return self.kv_heads if projection.role in ("key", "value", "fused") else self.heads


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
