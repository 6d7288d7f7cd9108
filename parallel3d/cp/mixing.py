"""Mixing: the usual ways in which a model mixes positions outside attention, found before anything runs.

With context parallelism each rank has a part of every sequence, in which positions are not those of the
whole. A model computes the same on parts if, outside attention, each position is computed from itself alone.
``check`` compares the operations of one forward on meta at two lengths: the dims whose sizes differ are the
sequence. What joins, moves, counts or selects positions is an error with the user's line and what to write
instead. It is no proof: what is not known here passes, and ``parallel3d.audit`` compares what really runs.

Two kinds of values may not be used with activations, but may exist: those *made* from the length alone
(``arange``, a mask, rows of a table), which each rank would make of its own part; and *sums* over the
sequence, which each rank has of its part: averaging over the ranks gives a loss that is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel3d._trace.record import ForwardProgram, Op, Ref
from parallel3d.errors import PlanError
from parallel3d.tp.resolve import is_in, numberless

Pair = tuple[Ref, Ref]


@dataclass(frozen=True)
class Mark:
    """Why a tensor may not be combined with activations. ``kind``: ``"made"``: it was made from the length of
    a rank's part; ``"sum"``: it is a sum over the sequence. ``text``: the cause, for the error."""

    kind: str
    text: str


_SQUARE = -1  # the layout of a tensor of which more than one dim is the sequence

_MAKE_POSITIONS = (
    "Take positions from the batch (position_ids, which p3d.cp.shard_batch cuts), or make them by "
    "p3d.cp.positions(self, length)"
)
_MASKS = (
    "Leave masks to attention: is_causal=True of F.scaled_dot_product_attention, or a (batch, 1, 1, length) "
    "bool mask of padding; p3d.cp.shard_batch knows packed documents"
)
_BY_HAND = "Attention written by hand is not found: write F.scaled_dot_product_attention"
_ASSERT = (
    "If each position is computed from itself alone all the same, say so: "
    'context_parallel=p3d.cp.ContextParallel(position_wise=("{module}",))'
)


def check(first: ForwardProgram, second: ForwardProgram, lengths: tuple[int, int]) -> None:
    """Compares the operations of two forwards of a model, recorded with sequences of two ``lengths``; raises
    PlanError if an operation outside attention mixes positions."""
    checker = _Checker(lengths, set(first.attention))
    for pair in zip(first.inputs, second.inputs, strict=True):
        checker.enter(pair)
    checker.live |= first.live
    for a, b in zip(first.ops, second.ops, strict=False):
        checker.step(a, b)
    if len(first.ops) != len(second.ops):
        longer = max(first.ops, second.ops, key=len)
        checker.fail(longer[min(len(first.ops), len(second.ops))], _LONGER, "")


_LONGER = "runs other operations when sequences are longer, from"


def _differing(pair: Pair) -> list[int]:
    a, b = pair
    return [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]


def _layout(pair: Pair) -> int | None:
    """Returns the dim that is the sequence, by the sizes in the two forwards; None: none is; ``_SQUARE``:
    several are."""
    dims = _differing(pair)
    return None if not dims else dims[0] if len(dims) == 1 else _SQUARE


class _Checker:
    """Goes through the operations of two forwards in order, and raises PlanError where one mixes positions.

    Attributes:
        marks: storage -> why its values may not be combined with activations.
        live: storages whose values depend on the model's inputs or parameters.
        attends: paths of the modules that call attention, which ``position_wise`` may not name.
    """

    def __init__(self, lengths: tuple[int, int], attends: set[str]) -> None:
        self.lengths, self.attends = lengths, attends
        self.marks: dict[int, Mark] = {}
        self.live: set[int] = set()

    def enter(self, pair: Pair) -> None:
        """Registers an input of the model; PlanError if several of its dims are the sequence."""
        self.live.add(pair[0].storage)
        if _layout(pair) == _SQUARE:
            raise PlanError(
                f"an input of the model, {pair[0].shape} for sequences of {self.lengths[0]} tokens, has "
                f"several dims of that length; {_MASKS}"
            )

    # ---- errors ----

    def fail(self, op: Op, what: str, advice: str, *, may_assert: bool = True) -> None:
        advice = advice or "Do it where whole sequences are at hand, before p3d.cp.shard_batch"
        raise PlanError(
            f"context parallelism: {_where(op)} {what} {_name(op)}{_at(op)}, but each rank has only a part "
            f"of every sequence. {advice}{self._assert(op) if may_assert else ''}"
        )

    def _fail_mark(self, op: Op, mark: Mark, advice: str) -> None:
        advice = advice or "Do it where whole sequences are at hand, or leave it out"
        raise PlanError(
            f"context parallelism: {mark.text}, and {_where(op)} goes on with it by {_name(op)}{_at(op)}; "
            f"each rank has only a part of every sequence. {advice}{self._assert(op)}"
        )

    def _assert(self, op: Op) -> str:
        if not op.module or any(is_in(path, op.module) for path in self.attends):
            return ""
        return ". " + _ASSERT.format(module=numberless(op.module))

    # ---- one operation ----

    def step(self, a: Op, b: Op) -> None:
        """Checks one operation, ``a`` and ``b`` in the two forwards, and sets the marks of its results."""
        if a.name != b.name or len(a.outputs) != len(b.outputs):
            self.fail(a, _LONGER, "")
        given = list(zip(refs_in(a.args), refs_in(b.args), strict=True))
        made = list(zip(a.outputs, b.outputs, strict=True))
        if any(len(x.shape) != len(y.shape) for x, y in (*given, *made)):
            self.fail(a, _LONGER, "")
        live = any(x.storage in self.live for x, _ in given)
        name = _name(a).rstrip("_")
        if name in ("attention", "leaf"):
            self._look_at_marks(a, given)
            if name == "attention":
                self._attention(a, given)
            self.live |= {x.storage for x, _ in made}
            return
        mark = self._join(a, given)
        mark = self._new(a, name, given, made, live) or mark
        written = [x for x, _ in given[:1]] if _name(a).endswith("_") else []
        for ref in [*(x for x, _ in made), *written]:
            if live:
                self.live.add(ref.storage)
            if mark is not None:
                self.marks[ref.storage] = mark

    def _join(self, op: Op, given: list[Pair]) -> Mark | None:
        """Returns the mark that an operation's results get from its arguments ``given``; PlanError if it
        combines a marked tensor with activations."""
        marks = [self.marks[x.storage] for x, _ in given if x.storage in self.marks]
        if not marks:
            return None
        mark = next((m for m in marks if m.kind == "made"), marks[0])
        clean = [x for x, _ in given if x.storage in self.live and x.storage not in self.marks]
        if mark.kind == "made" and clean:
            masks = "mask" in mark.text or "x length" in mark.text
            self._fail_mark(op, mark, _MASKS if masks else _MAKE_POSITIONS)
        if mark.kind == "sum" and any(x.shape not in ((), (1,)) for x in clean):
            self._fail_mark(op, mark, "")
        return mark

    def _new(
        self, op: Op, name: str, given: list[Pair], made: list[Pair], live: bool
    ) -> Mark | None:
        """Returns a new mark for an operation's results (positions made from the local length, a sum over the
        sequence), or None. Raises PlanError if the operation mixes positions of activations."""
        layouts = [_layout(pair) for pair in given]
        if name in _POSITIONS:
            return self._made(op, "positions") if any(map(_differing, made)) else None
        if any(_layout(pair) == _SQUARE for pair in made):
            depends = any(
                x.storage in self.live
                for (x, _), layout in zip(given, layouts, strict=True)
                if layout is not None
            )
            if depends:
                advice = _BY_HAND if name in _MATMULS else _MASKS
                self.fail(op, "compares positions with each other by", advice)
            return self._made(op, "a tensor of length x length")
        if not any(layout is not None for layout in layouts):
            if given and any(map(_differing, made)) and name not in _GROW:
                if live:
                    self.fail(
                        op, "takes as many rows of a table as its part is long, by", _MAKE_POSITIONS
                    )
                return self._made(op, "rows of a table")
            return None
        if _SQUARE in layouts:
            return self._made(op, "a tensor of length x length") if not live else None
        rule = _RULES.get(name)
        found = None if rule is None else rule(op, given, made)
        if found is None:
            if live:
                self._check_sizes(op, made)
            return None
        what, advice = found
        if what == "sum" and live:
            return Mark("sum", f"{_where(op)} takes the {name} over the sequence{_at(op)}")
        if live:
            self.fail(op, f"{what} by" if not what.endswith(" by") else what, advice)
        return self._made(op, "positions")

    def _check_sizes(self, op: Op, made: list[Pair]) -> None:
        """Raises PlanError for a dim that grows with the sequence but is no multiple of its length."""
        for a, b in made:
            for d in _differing((a, b)):
                sizes = a.shape[d], b.shape[d]
                times = [divmod(size, n) for size, n in zip(sizes, self.lengths, strict=True)]
                if times[0] != times[1] or times[0][1]:
                    self.fail(
                        op,
                        "makes a tensor whose size is neither the length nor a multiple of it "
                        f"({sizes[0]} for {self.lengths[0]} tokens, {sizes[1]} for {self.lengths[1]}) by",
                        "",
                    )

    def _made(self, op: Op, what: str) -> Mark:
        text = f"{_where(op)} makes {what} by {_name(op)}{_at(op)} from the length of its own part"
        return Mark("made", text)

    # ---- attention ----

    def _look_at_marks(self, op: Op, given: list[Pair]) -> None:
        mask = op.args.get("mask")
        for x, _ in given:
            bad = self.marks.get(x.storage)
            if bad is not None and not (isinstance(mask, Ref) and x.number == mask.number):
                self._fail_mark(op, bad, _MAKE_POSITIONS if bad.kind == "made" else "")

    def _attention(self, op: Op, given: list[Pair]) -> None:
        def fail(what: str, advice: str) -> None:
            self.fail(op, what, advice, may_assert=False)

        layouts = [_layout(pair) for pair in given[:3]]
        if layouts == [None] * 3:
            fail(
                "attends over something else than the sequence, by",
                "That is not supported with context parallelism",
            )
        if None in layouts:
            fail(
                "attends to another sequence, by",
                "Cross attention and encoder-decoder models are not supported with context parallelism",
            )
        dims = op.args.get("dims") or (2, 2, 2)
        for (x, _), layout, dim in zip(given, layouts, dims, strict=False):
            if layout != dim or x.shape[dim] != self.lengths[0]:
                fail(
                    f"calls attention with a tensor of shape {x.shape}, which is not laid out as "
                    "(batch, heads, length, size), by",
                    "Reshape it to that",
                )
        if len(given) < 4 or op.args.get("mask") is None or op.args.get("mask_is_causal"):
            return
        x, bad = given[3][0], self.marks.get(given[3][0].storage)
        if _layout(given[3]) != 3 or x.shape[1:3] != (1, 1) or bad is not None:
            made_by = f" ({bad.text})" if bad is not None else ""
            fail(f"gives a mask of shape {x.shape}{made_by} to", _MASKS)


def _where(op: Op) -> str:
    return f"{op.module!r}" if op.module else "the model"


def _at(op: Op) -> str:
    return f" ({op.line})" if op.line != "?" else ""


def _name(op: Op) -> str:
    return op.name.partition(".")[0]


def refs_in(value: Any) -> list[Ref]:
    """Returns the tensors in an operation's arguments, in order."""
    if isinstance(value, Ref):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return [ref for item in items for ref in refs_in(item)]
    return []


# ---- rules: of an operation that has the sequence among its arguments, what it does; None: nothing ----

Rule = Callable[[Op, list[Pair], list[Pair]], tuple[str, str] | None]
_SOME = "takes or sets some positions of the sequence,"


def _on(pair: Pair, dim: Any) -> bool:
    """Whether one of ``dim`` (a number, a list, or None for all dims) is the sequence dim of the tensor."""
    layout = _layout(pair)
    if layout is None or dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return layout is not None
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return any(d % max(len(pair[0].shape), 1) == layout for d in dims)


def _where_on(what: str, advice: str = "", *, dim: Any = None, any_of: bool = False) -> Rule:
    """Returns a rule that reports ``what`` if the operation acts on the sequence dim.

    Args:
        advice: what the error advises to do.
        dim: the dims on which the operation acts, if it has no argument that says it.
        any_of: whether all tensor arguments are looked at; by default the first one.
    """

    def rule(op: Op, given: list[Pair], made: list[Pair]) -> tuple[str, str] | None:
        at = op.args.get("dim", op.args.get("dims", dim))
        pairs = given if any_of else given[:1]
        return (what, advice) if any(_on(pair, at) for pair in pairs) else None

    return rule


def _select(op: Op, given: list[Pair], made: list[Pair]) -> tuple[str, str] | None:
    (pair, *_), dim = given, _layout(given[0])
    if dim is None or not _on(pair, op.args.get("dim", 0)):
        return None
    keeps = len(made) == 1 and len(made[0][0].shape) == len(pair[0].shape)
    if keeps and all(m.shape[dim] == x.shape[dim] for m, x in zip(made[0], pair, strict=True)):
        return None  # all of it
    return "takes some positions of the sequence,", ""


def _matmul(op: Op, given: list[Pair], made: list[Pair]) -> tuple[str, str] | None:
    left, right = given[-2:]
    if _on(left, -1) or _on(right, -2 if len(right[0].shape) > 1 else 0):
        return "sums over the sequence", _BY_HAND
    return None


def _convolution(op: Op, given: list[Pair], made: list[Pair]) -> tuple[str, str] | None:
    dim, kernel = _layout(given[0]), given[1][0].shape
    if dim in (None, 0):
        return None
    if dim >= 2 and not op.args.get("transposed") and kernel[dim] == 1:
        return None
    return "joins neighbouring positions,", ""


def _index(op: Op, given: list[Pair], made: list[Pair]) -> tuple[str, str] | None:
    dim, indices = _layout(given[0]), op.args.get("indices") or []
    sets = dim is not None and dim < len(indices) and indices[dim] is not None
    return (_SOME, "") if sets else None


def _pad(op: Op, given: list[Pair], made: list[Pair]) -> tuple[str, str] | None:
    dim, pad = _layout(given[0]), list(op.args.get("pad") or ())
    if dim is None:
        return None
    place = 2 * (len(given[0][0].shape) - 1 - dim)  # pairs of numbers, the last dim's first
    moved = any(pad[place : place + 2])
    return ("puts something before or after the sequence,", "") if moved else None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_POSITIONS = _names("arange linspace logspace eye randperm tril_indices triu_indices")
# They make a tensor longer without reading rows of another.
_GROW = _names(
    "expand repeat stack new_zeros new_ones new_empty new_full new_empty_strided full_like zeros_like "
    "ones_like empty_like rand_like randn_like fill zero copy set as_strided view _unsafe_view reshape"
)
_MATMULS = _names("mm bmm addmm baddbmm _addmm_activation dot mv")

_BY_NAME: list[tuple[str, Rule]] = [
    ("sum mean nansum", _where_on("sum")),
    (
        "amax amin max min argmax argmin any all prod var std var_mean std_mean linalg_vector_norm norm "
        "logsumexp count_nonzero median nanmedian mode aminmax _softmax softmax _log_softmax log_softmax "
        "cumsum cumprod cummax cummin logcumsumexp _logcumsumexp sort topk argsort kthvalue flip roll diff "
        "_safe_softmax _cummax_helper renorm glu _fft_c2c _fft_r2c _fft_c2r",
        _where_on("computes over the sequence,"),
    ),
    (
        "select slice narrow unbind split split_with_sizes unsafe_split chunk unsafe_split_with_sizes "
        "tensor_split unfold",
        _select,
    ),
    (
        "cat concat",
        _where_on("joins sequences, or puts something before or after one,", dim=0, any_of=True),
    ),
    (" ".join(_MATMULS), _matmul),
    (
        "native_batch_norm _native_batch_norm_legit cudnn_batch_norm _batch_norm_with_update",
        lambda op, given, made: ("takes statistics over the sequence,", ""),
    ),
    ("convolution _convolution", _convolution),
    ("index index_put _index_put_impl _unsafe_index", _index),
    (
        "gather index_select scatter scatter_add index_add index_copy index_fill scatter_reduce",
        _where_on(_SOME, dim=0, any_of=True),
    ),
    ("tril triu", _where_on("makes a mask from its own part,", _MASKS, dim=[-1, -2])),
    ("constant_pad_nd", _pad),
]
_RULES: dict[str, Rule] = {name: rule for names, rule in _BY_NAME for name in _names(names)}
