"""Mixing: what a model does along the sequence outside attention, found in the operations of two lengths.

With context parallelism each rank has a part of every sequence, in which positions are not those of the
whole. A model computes the same on parts if, outside attention, each position is computed from itself alone.
``check`` compares the operations of one forward at two lengths: the dims whose sizes differ are the sequence.
An operation that joins, moves, counts or selects positions is an error, and so is one about which that is not
known.

Two kinds of values may not be used with activations or parameters, but may exist:

- *made here*: numbers made from the length alone (``arange``, a mask, rows of a table). Each rank would make
  those of its own part.
- *sums* over the sequence, which each rank has of its part. A loss is one, and averaging over the ranks gives
  that of the whole; so sums may be added, scaled and divided by each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from parallel3d.cp.flow import Flow, Op, Ref
from parallel3d.errors import PlanError

Pair = tuple[Ref, Ref]


@dataclass(frozen=True)
class Layout:
    """Where a tensor has the sequence: in ``dim``, whose index is (outer, position, inner) flattened."""

    dim: int
    inner: int


@dataclass(frozen=True)
class Mark:
    """What is wrong with a value: ``made`` (from the local length) or ``sum``; and the text for an error."""

    kind: str
    text: str


_SQUARE = Layout(-1, 0)  # more than one dim is the sequence

_MAKE_POSITIONS = (
    "Take positions from the batch (position_ids, which p3d.cp.shard_batch cuts), or make them by "
    "p3d.cp.positions(self, length)"
)
_MASKS = (
    "Leave masks to attention: is_causal=True of F.scaled_dot_product_attention, or a (batch, 1, 1, length) "
    "bool mask of padding; p3d.cp.shard_batch knows packed documents"
)
_ASSERT = (
    "If each position is computed from itself alone all the same, say so: "
    'context_parallel=p3d.cp.ContextParallel(position_wise=("{module}",))'
)


def check(first: Flow, second: Flow, lengths: tuple[int, int]) -> None:
    """Compares the operations of a model at two lengths.

    Raises:
        PlanError: the model does something along the sequence outside attention, or may do so.
    """
    checker = _Checker(lengths)
    for flow in zip(first.inputs, second.inputs, strict=True):
        checker.enter(flow)
    checker.live |= first.live
    for a, b in zip(first.ops, second.ops, strict=False):
        checker.step(a, b)
    if len(first.ops) != len(second.ops):
        longer = max(first.ops, second.ops, key=len)
        op = longer[min(len(first.ops), len(second.ops))]
        checker.fail(op, "runs other operations when sequences are longer, from", "")
    for ref in first.outputs:
        mark = checker.marks.get(ref.storage)
        if mark is not None and mark.kind == "sum" and ref.shape not in ((), (1,)):
            raise PlanError(
                f"context parallelism: {mark.text}, and the model returns it, {ref.shape}; each rank has "
                "only a part of every sequence. Return what each position has, and join it by p3d.cp.gather "
                "(for metrics), or compute a loss of each position"
            )


def output_layouts(first: Flow, second: Flow, lengths: tuple[int, int]) -> list[int | None]:
    """Returns the dim of the sequence of each output tensor, None where it has none."""
    found = []
    for a, b in zip(first.outputs, second.outputs, strict=True):
        dims = _differing((a, b))
        found.append(dims[0] if len(dims) == 1 else None)
    return found


def _differing(pair: Pair) -> list[int]:
    a, b = pair
    return [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]


class _Checker:
    def __init__(self, lengths: tuple[int, int]) -> None:
        self.lengths = lengths
        self.layouts: dict[int, Layout | None] = {}
        self.marks: dict[int, Mark] = {}  # by storage
        self.live: set[int] = set()  # storages that depend on inputs or parameters
        self.op: Op | None = None

    # ---- what is known of tensors ----

    def enter(self, pair: Pair) -> None:
        """An input of the model."""
        self.live.add(pair[0].storage)
        dims = _differing(pair)
        if len(dims) > 1:
            raise PlanError(
                f"an input of the model, {pair[0].shape} for sequences of {self.lengths[0]} tokens, has "
                f"several dims of that length; {_MASKS}"
            )
        self.layouts[pair[0].number] = Layout(dims[0], 1) if dims else None

    def layout(self, pair: Pair) -> Layout | None:
        """Returns where the tensor has the sequence; of one that was not seen, by its sizes."""
        a = pair[0]
        if a.number not in self.layouts:
            self.layouts[a.number] = self._by_size(pair)
        return self.layouts[a.number]

    def _by_size(self, pair: Pair, inner: int = 1) -> Layout | None:
        dims = _differing(pair)
        if not dims:
            return None
        if len(dims) > 1:
            return _SQUARE
        sizes = [ref.shape[dims[0]] for ref in pair]
        times = [divmod(size, s) for size, s in zip(sizes, self.lengths, strict=True)]
        if times[0] != times[1] or times[0][1]:
            assert self.op is not None
            self.fail(
                self.op,
                f"makes a tensor whose size is neither the length nor a multiple of it ({sizes[0]} for "
                f"{self.lengths[0]} tokens, {sizes[1]} for {self.lengths[1]}) by",
                "",
            )
        return Layout(dims[0], inner)

    # ---- errors ----

    def fail(self, op: Op, what: str, advice: str, *, may_assert: bool = True) -> None:
        where = f"{op.module!r}" if op.module else "the model"
        advice = advice or "Do it where whole sequences are at hand, before p3d.cp.shard_batch"
        if may_assert and op.module:
            advice += ". " + _ASSERT.format(module=pattern_of(op.module))
        at = f" ({op.line})" if op.line != "?" else ""
        raise PlanError(
            f"context parallelism: {where} {what} {op.name.partition('.')[0]}{at}, but each rank has only a "
            f"part of every sequence. {advice}"
        )

    # ---- one operation ----

    def step(self, a: Op, b: Op) -> None:
        """Checks one operation, and notes what is known of its results."""
        self.op = a
        if a.name != b.name or len(a.outputs) != len(b.outputs):
            self.fail(a, "runs other operations when sequences are longer, from", "")
        given = list(zip(refs_in(a.args), refs_in(b.args), strict=True))
        made = list(zip(a.outputs, b.outputs, strict=True))
        if any(len(x.shape) != len(y.shape) for x, y in (*given, *made)):
            self.fail(a, "runs other operations when sequences are longer, from", "")
        live = any(x.storage in self.live for x, _ in given)
        mark = self._join(a, given, live)
        name = a.name.partition(".")[0].rstrip("_")
        rule = _RULES.get(name)
        layouts = [layout for p in given if (layout := self.layout(p)) is not None]
        if any(lay is _SQUARE for lay in layouts) and name not in ("attention", "leaf"):
            if live and any(
                x.storage in self.live for (x, y) in given if self.layout((x, y)) is _SQUARE
            ):
                self.fail(a, "compares positions with each other by", _MASKS)
            new: Mark | None = mark or Mark("made", self._made(a, "a tensor of length x length"))
        else:
            new = self._rule(a, b, name, rule, given, made, layouts, live) or mark
        inner = {lay.inner for lay in layouts if lay is not _SQUARE}
        for pair in made:
            number = pair[0].number
            if name in _VIEWS and len(given) == 1:
                self.layouts[number] = self._viewed(a, given[0], pair)
            elif number not in self.layouts or pair[0] not in [x for x, _ in given]:
                self.layouts[number] = self._by_size(pair, min(inner) if inner else 1)
            if self.layouts[number] is _SQUARE and name not in ("attention", "leaf"):
                if live and not self._constant(given):
                    self.fail(a, "compares positions with each other by", _MASKS)
                new = new or Mark("made", self._made(a, "a tensor of length x length"))
        written = [x for x, _ in given[:1]] if a.name.partition(".")[0].endswith("_") else []
        for ref in [*(x for x, _ in made), *written]:
            if live:
                self.live.add(ref.storage)
            if new is not None:
                self.marks[ref.storage] = new

    def _constant(self, given: list[Pair]) -> bool:
        """Whether none of the tensors with the sequence depends on the model's input."""
        return not any(x.storage in self.live for x, y in given if self.layout((x, y)) is not None)

    def _made(self, op: Op, what: str) -> str:
        where = f"{op.module!r}" if op.module else "the model"
        at = f" ({op.line})" if op.line != "?" else ""
        return f"{where} makes {what} by {op.name.partition('.')[0]}{at} from the length of its own part"

    def _join(self, op: Op, given: list[Pair], live: bool) -> Mark | None:
        """Returns the mark of a result of these tensors; fails where a marked one may not be used."""
        marks = [self.marks[x.storage] for x, _ in given if x.storage in self.marks]
        if not marks:
            return None
        name = op.name.partition(".")[0].rstrip("_")
        made = next((m for m in marks if m.kind == "made"), None)
        if name in ("attention", "leaf", "branch"):
            return made if name == "branch" else None  # their own rules look at them
        clean_live = [x for x, _ in given if x.storage in self.live and x.storage not in self.marks]
        if made is not None:
            if clean_live:
                advice = (
                    _MASKS if "mask" in made.text or "x length" in made.text else _MAKE_POSITIONS
                )
                self._fail_mark(op, made, advice)
            return made
        total = marks[0]
        with_sequence = [x for x, y in given if self.layout((x, y)) is not None]
        both = sum(x.storage in self.marks for x, _ in given) > 1
        wrong = (
            any(x.shape not in ((), (1,)) for x in clean_live)
            or with_sequence
            or (both and name in _PRODUCTS)
        )
        linear = name in _LINEAR or name in _VIEWS or name in _FREE
        if wrong or not linear:
            self._fail_mark(op, total, "")
        return total

    def _fail_mark(self, op: Op, mark: Mark, advice: str) -> None:
        where = f"{op.module!r}" if op.module else "the model"
        at = f" ({op.line})" if op.line != "?" else ""
        advice = advice or "Do it where whole sequences are at hand, or leave it out"
        raise PlanError(
            f"context parallelism: {mark.text}, and {where} goes on with it by "
            f"{op.name.partition('.')[0]}{at}; each rank has only a part of every sequence. {advice}"
            + (". " + _ASSERT.format(module=pattern_of(op.module)) if op.module else "")
        )

    def _viewed(self, op: Op, source: Pair, result: Pair) -> Layout | None:
        """The layout of a view with other sizes: the sequence must stay in its place among the elements."""
        before = self.layout(source)
        after = self._by_size(result)
        if before is None or before is _SQUARE or after is None or after is _SQUARE:
            return after
        inners = []
        for old, new in zip(source, result, strict=True):
            step = before.inner * prod(old.shape[before.dim + 1 :])
            inners.append(divmod(step, prod(new.shape[after.dim + 1 :])))
        size = result[0].shape[after.dim]
        if inners[0] != inners[1] or inners[0][1] or size % (inners[0][0] * self.lengths[0]):
            self.fail(op, "mixes the sequence with other dims by", "")
        return Layout(after.dim, inners[0][0])

    # ---- rules ----

    def _rule(
        self,
        a: Op,
        b: Op,
        name: str,
        rule: Any,
        given: list[Pair],
        made: list[Pair],
        layouts: list[Layout],
        live: bool,
    ) -> Mark | None:
        """Fails if the operation mixes positions; returns the mark of its result, if it makes one."""
        differs = name not in _SHAPED and _plain(a.args) != _plain(b.args)
        if name in ("full", "new_full"):
            differs = a.args["fill_value"] != b.args["fill_value"]
        if differs:
            if live:
                self.fail(a, "computes with a number that depends on the length, by", "")
            return Mark("made", self._made(a, "numbers"))
        if name == "attention" and any(
            a.args.get(k) != b.args.get(k) for k in ("scaling", "kwargs")
        ):
            self.fail(a, "gives a number that depends on the length to", "")
        if name in ("attention", "leaf", "branch"):
            return getattr(self, f"_{name}")(a, given, made, live)
        if name in _POSITIONS:
            if any(_differing(p) for p in made):
                return Mark("made", self._made(a, "positions"))
            return None
        if not layouts:
            # Without the sequence among the arguments.
            if any(_differing(p) for p in made) and given and name not in _FREE:
                if live:
                    self.fail(
                        a, "takes as many rows of a table as its part is long, by", _MAKE_POSITIONS
                    )
                return Mark("made", self._made(a, "rows of a table"))
            return None
        if rule is not None:
            return rule(self, a, given, made, live)
        if name in _FREE or name in _VIEWS:
            return None
        if a.pointwise or name in _POINTWISE:
            return self._pointwise(a, given, made, live)
        return self._mixes(a, live, "does something along the sequence that is not known here,")

    def _mixes(self, op: Op, live: bool, what: str, advice: str = "") -> Mark:
        if live:
            self.fail(op, what + ("" if what.endswith(" by") else " by"), advice)
        return Mark("made", self._made(op, "positions"))

    def _pointwise(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        places = set()
        for pair in given:
            layout = self.layout(pair)
            if layout is not None and layout is not _SQUARE:
                places.add((len(pair[0].shape) - layout.dim, layout.inner))
        if len({at for at, _ in places}) > 1:
            if live and not self._constant(given):
                self.fail(op, "compares positions with each other by", _MASKS)
            return Mark("made", self._made(op, "a mask"))
        if len(places) > 1:
            self.fail(op, "combines positions of tensors in another order by", "")
        return None

    def _on(self, pair: Pair, dim: Any) -> bool:
        """Whether ``dim`` (a number, several, or None for all) is the sequence of the tensor."""
        layout = self.layout(pair)
        if layout is None:
            return False
        if dim is None or (isinstance(dim, (list, tuple)) and not dim):
            return True
        dims = dim if isinstance(dim, (list, tuple)) else (dim,)
        return any(d % max(len(pair[0].shape), 1) == layout.dim for d in dims)

    def _reduce(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        if not self._on(given[0], op.args.get("dim")):
            return None
        if op.name.partition(".")[0] in ("sum", "mean", "nansum"):
            if live:
                where = f"{op.module!r}" if op.module else "the model"
                at = f" ({op.line})" if op.line != "?" else ""
                return Mark(
                    "sum", f"{where} takes the {op.name.partition('.')[0]} over the sequence{at}"
                )
            return Mark("made", self._made(op, "a number"))
        return self._mixes(op, live, "computes over the sequence, by")

    def _along(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        dim = op.args.get("dim", op.args.get("dims", None))
        if not self._on(given[0], dim):
            return None
        return self._mixes(op, live, "computes over the sequence, by")

    def _select(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        pair = given[0]
        if not self._on(pair, op.args.get("dim", 0)):
            return None
        layout = self.layout(pair)
        if layout is not None and len(made) == 1 and len(made[0][0].shape) == len(pair[0].shape):
            both = zip(made[0], pair, strict=True)
            if all(m.shape[layout.dim] == x.shape[layout.dim] for m, x in both):
                return None  # all of it
        return self._mixes(op, live, "takes some positions of the sequence, by")

    def _cat(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        dim = op.args.get("dim", 0)
        if any(self._on(pair, dim) for pair in given):
            return self._mixes(
                op, live, "joins sequences, or puts something before or after one, by"
            )
        return None

    def _matmul(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        left, right = given[-2:]
        if self._on(left, -1) or self._on(right, -2 if len(right[0].shape) > 1 else 0):
            advice = "Attention written by hand is not found: write F.scaled_dot_product_attention"
            return self._mixes(op, live, "sums over the sequence by", advice)
        if any(len(_differing(m)) > 1 for m in made):
            advice = "Attention written by hand is not found: write F.scaled_dot_product_attention"
            return self._mixes(op, live, "compares positions with each other by", advice)
        return None

    def _norm(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        dims = len(op.args.get("normalized_shape") or (0,))
        if self._on(given[0], [-d for d in range(1, dims + 1)]):
            return self._mixes(op, live, "normalizes over the sequence, by")
        return None

    def _group_norm(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        layout = self.layout(given[0])
        if layout is not None and layout.dim != 0:
            return self._mixes(op, live, "normalizes over the sequence, by")
        return None

    def _batch_norm(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        return self._mixes(op, live, "takes statistics over the sequence, by")

    def _convolution(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        layout, weight = self.layout(given[0]), given[1][0]
        if layout is None or layout.dim == 0:
            return None
        if layout.dim >= 2 and layout is not _SQUARE and not op.args.get("transposed"):
            place = layout.dim - 2
            if (
                weight.shape[layout.dim] == 1
                and op.args["stride"][place % len(op.args["stride"])] == 1
            ):
                return None
        return self._mixes(op, live, "joins neighbouring positions, by")

    def _embedding(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        if self.layout(given[0]) is not None:
            return self._mixes(op, live, "looks up positions of the sequence, by")
        return None

    def _index(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        layout = self.layout(given[0])
        if layout is None or layout is _SQUARE:
            return None
        indices = op.args.get("indices") or []
        if layout.dim < len(indices) and indices[layout.dim] is not None:
            return self._mixes(op, live, "takes or sets some positions of the sequence, by")
        return None

    def _gather(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        dim = op.args.get("dim", 0)
        if any(self._on(pair, dim) for pair in given):
            return self._mixes(op, live, "takes or sets some positions of the sequence, by")
        return None

    def _triangle(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        if self._on(given[0], [-1, -2]):
            return self._mixes(op, live, "makes a mask from its own part, by", _MASKS)
        return None

    def _pad(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        layout = self.layout(given[0])
        if layout is None or made[0][0].shape[layout.dim] == given[0][0].shape[layout.dim]:
            return None
        return self._mixes(op, live, "puts something before or after the sequence, by")

    def _loss(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        if _differing(made[0]):
            return None
        where = f"{op.module!r}" if op.module else "the model"
        return Mark("sum", f"{where} computes a loss ({op.name.partition('.')[0]})")

    # ---- pseudo-operations ----

    def _attention(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        q, k, v = given[:3]
        layouts = [self.layout(x) for x in (q, k, v)]
        dims = op.args.get("dims") or (2, 2, 2)
        if layouts[0] is None and layouts[1] is None and layouts[2] is None:
            self.fail(
                op,
                "attends over something else than the sequence, by",
                "That is not supported with context parallelism",
                may_assert=False,
            )
        if any(x is None for x in layouts):
            self.fail(
                op,
                "attends to another sequence, by",
                "Cross attention and encoder-decoder models are not supported with context parallelism",
                may_assert=False,
            )
        for pair, layout, dim in zip((q, k, v), layouts, dims, strict=True):
            assert layout is not None
            size = pair[0].shape[layout.dim] if layout is not _SQUARE else 0
            if layout is _SQUARE or layout.dim != dim or size != self.lengths[0]:
                self.fail(
                    op,
                    f"calls attention with a tensor of shape {pair[0].shape}, which is not laid out as "
                    "(batch, heads, length, size), by",
                    "Reshape it to that",
                    may_assert=False,
                )
        for what in ("q", "k", "v"):
            index = ("q", "k", "v").index(what)
            bad = self.marks.get(given[index][0].storage)
            if bad is not None:
                self._fail_mark(op, bad, _MAKE_POSITIONS if bad.kind == "made" else "")
        if len(given) > 3 and op.args.get("mask") is not None:
            pair = given[3]
            bad, layout = self.marks.get(pair[0].storage), self.layout(pair)
            if op.args.get("mask_is_causal"):
                return None
            shape = pair[0].shape
            padding = (
                layout is not None
                and layout is not _SQUARE
                and layout.dim == 3
                and shape[1:3] == (1, 1)
                and bad is None
            )
            if not padding:
                made_by = f" ({bad.text})" if bad is not None else ""
                self.fail(
                    op, f"gives a mask of shape {shape}{made_by} to", _MASKS, may_assert=False
                )
        return None

    def _leaf(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        self.live |= {x.storage for x, _ in made}
        for pair in given:
            bad = self.marks.get(pair[0].storage)
            if bad is not None:
                self._fail_mark(op, bad, _MAKE_POSITIONS if bad.kind == "made" else "")
        return None

    def _branch(self, op: Op, given: list[Pair], made: list[Pair], live: bool) -> Mark | None:
        return None


def pattern_of(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def refs_in(value: Any) -> list[Ref]:
    """Returns the tensors among arguments, in order."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, dict):
        return [ref for item in value.values() for ref in refs_in(item)]
    if isinstance(value, (list, tuple)):
        return [ref for item in value for ref in refs_in(item)]
    return []


def _plain(value: Any) -> Any:
    """Returns the arguments without tensors, to compare."""
    if isinstance(value, Ref):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (int, float, bool, str)) else None


_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy"}

# They keep each position, and need no look at their arguments.
_FREE = {
    *(
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "contiguous",
        "detach",
    ),
    *("alias", "_to_copy", "to", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like"),
    *("randn_like", "bernoulli", "native_dropout", "dropout", "view_as_real", "view_as_complex"),
    *("fill", "zero", "lift_fresh", "lift_fresh_copy", "zeros", "ones", "empty", "full", "rand"),
    *("randn", "new_empty", "new_zeros", "new_ones", "new_full", "scalar_tensor", "empty_strided"),
    *("new_empty_strided", "movedim", "swapaxes", "real", "imag", "_conj", "resolve_conj"),
    *(
        "normal",
        "uniform",
        "repeat",
        "exponential",
        "random",
        "numpy_T",
        "mT",
        "set",
        "sym_size",
        "stack",
    ),
}
_POINTWISE = {"copy", "where", "masked_fill", "polar", "complex", "bucketize", "isin", "_to_copy"}

# Sizes and places among their arguments differ between lengths.
_SHAPED = {
    *_VIEWS,
    *(
        "expand",
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "new_empty",
        "new_zeros",
        "new_ones",
    ),
    *(
        "new_full",
        "arange",
        "linspace",
        "slice",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "narrow",
    ),
    *("repeat", "empty_strided", "new_empty_strided", "as_strided", "randint", "randperm", "chunk"),
    *(
        "constant_pad_nd",
        "unsafe_split_with_sizes",
        "attention",
        "tensor_split",
        "eye",
        "native_group_norm",
        "resize",
    ),
}
_POSITIONS = {"arange", "linspace", "eye", "randperm", "tril_indices", "triu_indices", "logspace"}

# Of sums over the sequence.
_PRODUCTS = {"mul", "pow", "mm", "bmm", "dot", "addmm"}
_LINEAR = {
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "true_divide",
    "rsub",
    "sum",
    "mean",
    "stack",
    "cat",
    "copy",
}
_LINEAR |= {"clamp", "clamp_min", "select", "slice", "index"}

_C = _Checker
_RULES: dict[str, Any] = {
    **dict.fromkeys(
        (
            *(
                "sum",
                "mean",
                "nansum",
                "amax",
                "amin",
                "max",
                "min",
                "argmax",
                "argmin",
                "any",
                "all",
            ),
            *(
                "prod",
                "var",
                "std",
                "var_mean",
                "std_mean",
                "linalg_vector_norm",
                "norm",
                "logsumexp",
            ),
            *("count_nonzero", "median", "nanmedian", "mode", "aminmax"),
        ),
        _C._reduce,
    ),
    **dict.fromkeys(
        (
            *("_softmax", "softmax", "_log_softmax", "log_softmax", "cumsum", "cumprod", "cummax"),
            *(
                "cummin",
                "logcumsumexp",
                "_logcumsumexp",
                "sort",
                "topk",
                "argsort",
                "kthvalue",
                "flip",
            ),
            *("roll", "diff", "_safe_softmax", "_cummax_helper", "renorm", "glu"),
        ),
        _C._along,
    ),
    **dict.fromkeys(
        (
            *("select", "slice", "narrow", "unbind", "split", "split_with_sizes", "unsafe_split"),
            *("chunk", "unsafe_split_with_sizes", "tensor_split", "unfold"),
        ),
        _C._select,
    ),
    **dict.fromkeys(("cat", "concat"), _C._cat),
    **dict.fromkeys(
        ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "dot", "mv"), _C._matmul
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _C._norm),
    "native_group_norm": _C._group_norm,
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "cudnn_batch_norm",
            "_batch_norm_with_update",
        ),
        _C._batch_norm,
    ),
    **dict.fromkeys(("convolution", "_convolution"), _C._convolution),
    "embedding": _C._embedding,
    **dict.fromkeys(("index", "index_put", "_index_put_impl", "_unsafe_index"), _C._index),
    **dict.fromkeys(
        (
            *("gather", "index_select", "scatter", "scatter_add", "index_add", "index_copy"),
            *("index_fill", "scatter_reduce"),
        ),
        _C._gather,
    ),
    **dict.fromkeys(("tril", "triu"), _C._triangle),
    "constant_pad_nd": _C._pad,
    **dict.fromkeys(
        (
            *("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "l1_loss", "kl_div"),
        ),
        _C._loss,
    ),
}
"""Of operations that have the sequence among their arguments: what finds out whether they mix positions."""
