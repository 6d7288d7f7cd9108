"""MeshLayout: the intended sizes of the mesh axes and the arithmetic of ranks. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import product
from math import isqrt, log, prod

from parallel3d.errors import MeshError
from parallel3d.mesh.axes import AXES, DATA_AXES

_INFER = -1


@dataclass(frozen=True)
class MeshLayout:
    """The sizes of the mesh axes ``(replicate, shard, tp)``, outermost to innermost.

    A plain value: it can be made, compared and printed without a process group. Rank ``r`` has the
    coordinates of ``r`` in a row-major grid of shape ``(replicate, shard, tp)``.

    Attributes:
        replicate: copies of the sharded model (HSDP's outer axis); each reads other samples.
        shard: ranks that share one copy's parameters (FSDP); each reads other samples.
        tp: ranks that share each layer's computation; all of them read the same samples.

    At most one of them may be ``-1``: what the world size leaves, see :meth:`resolve`.

    Raises:
        MeshError: a size that is not an int, zero, below -1, or a second -1.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if type(size) is not int:
                raise MeshError(
                    f"{axis}={size!r} is a {type(size).__name__}: the size of a mesh axis is an "
                    f"int, 1 or more, or -1 for what the world size leaves."
                )
            if size < 1 and size != _INFER:
                raise MeshError(
                    f"{axis}={size}: the size of a mesh axis is 1 or more (1 switches the axis "
                    f"off), or -1 for what the world size leaves."
                )
        inferred = [axis for axis in AXES if getattr(self, axis) == _INFER]
        if len(inferred) > 1:
            raise MeshError(
                f"{_and(inferred)} are -1: only one axis can be what the world size leaves. "
                f"Give all but one of them a size, for example {inferred[-1]}=1."
            )

    # Sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """``(replicate, shard, tp)`` as given, possibly with one -1."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def is_resolved(self) -> bool:
        """Whether every axis has a size, that is, none is -1."""
        return _INFER not in self.sizes

    @property
    def world_size(self) -> int:
        """The number of ranks: ``replicate * shard * tp``.

        Raises:
            MeshError: an axis is still -1.
        """
        self._require_resolved()
        return prod(self.sizes)

    @property
    def data_size(self) -> int:
        """How many ranks read different samples: ``replicate * shard``.

        Raises:
            MeshError: an axis is still -1.
        """
        self._require_resolved()
        return prod(getattr(self, axis) for axis in DATA_AXES)

    def resolve(self, world_size: int) -> "MeshLayout":
        """This layout for ``world_size`` ranks: -1 replaced by the size that is left, or itself.

        Args:
            world_size: number of ranks of the job.

        Returns:
            A layout without -1 whose ``world_size`` is ``world_size``.

        Raises:
            MeshError: the sizes do not multiply to ``world_size``, or do not divide it.
        """
        if type(world_size) is not int or world_size < 1:
            raise MeshError(f"world_size={world_size!r}: a world has 1 rank or more, as an int.")
        known = prod(size for size in self.sizes if size != _INFER)
        if self.is_resolved:
            if known != world_size:
                raise MeshError(self._why_not(world_size))
            return self
        if world_size % known:
            raise MeshError(self._why_not(world_size))
        left = world_size // known
        return replace(self, **{a: left for a in AXES if getattr(self, a) == _INFER})

    # Ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of ``rank``: ``{"replicate": i, "shard": j, "tp": k}``.

        Raises:
            MeshError: ``rank`` is not in ``range(world_size)``, or an axis is still -1.
        """
        world_size = self.world_size
        if type(rank) is not int or not 0 <= rank < world_size:
            raise MeshError(f"rank {rank!r} is not in {self}: ranks go from 0 to {world_size - 1}.")
        at = {}
        for axis in reversed(AXES):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return {axis: at[axis] for axis in AXES}

    def rank(self, **at: int) -> int:
        """The rank at these coordinates, the inverse of :meth:`coordinates`.

        Args:
            at: ``replicate``, ``shard``, ``tp``; 0 where one is not given.

        Raises:
            MeshError: a coordinate is outside its axis, an axis is unknown or still -1.
        """
        self._require_resolved()
        for axis in at:
            self._check_axis(axis)
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            coordinate = at.get(axis, 0)
            if type(coordinate) is not int or not 0 <= coordinate < size:
                raise MeshError(
                    f"{axis} coordinate {coordinate!r} is not in {self}: "
                    f"coordinates on {axis} go from 0 to {size - 1}."
                )
            rank = rank * size + coordinate
        return rank

    def stride(self, axis: str) -> int:
        """How far apart neighbours on ``axis`` are in ranks.

        Raises:
            MeshError: an unknown axis, or an axis that is still -1.
        """
        self._check_axis(axis)
        self._require_resolved()
        return prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])

    def _check_axis(self, axis: str) -> None:
        if axis not in AXES:
            near = get_close_matches(str(axis), AXES, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise MeshError(f"{axis!r} is not a mesh axis: the axes are {_and(AXES)}.{hint}")

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks that form each group of ``axis``: those that differ in this coordinate only.

        Args:
            axis: ``"replicate"``, ``"shard"`` or ``"tp"``.

        Returns:
            ``world_size / size of axis`` tuples of ranks, each in the order of the axis, sorted by
            their first rank. Together they hold every rank once.

        Raises:
            MeshError: an unknown axis, or an axis that is still -1.
        """
        stride = self.stride(axis)
        ranges = {a: range(1 if a == axis else getattr(self, a)) for a in AXES}
        groups = []
        for coordinates in product(*ranges.values()):
            first = self.rank(**dict(zip(AXES, coordinates, strict=True)))
            groups.append(tuple(first + stride * i for i in range(getattr(self, axis))))
        return groups

    def data_rank(self, rank: int) -> int:
        """Which of the ``data_size`` parts of the data ``rank`` reads.

        The ranks of one ``tp`` group read the same part; ``replicate`` and ``shard`` read others.

        Raises:
            MeshError: ``rank`` is not in ``range(world_size)``, or an axis is still -1.
        """
        at, number = self.coordinates(rank), 0
        for axis in DATA_AXES:
            number = number * getattr(self, axis) + at[axis]
        return number

    # Words

    def __str__(self) -> str:
        if not self.is_resolved:
            return _times(self)
        return f"{_times(self)} = {_count(prod(self.sizes))}"

    def _require_resolved(self) -> None:
        if not self.is_resolved:
            raise MeshError(
                f"{self} is not resolved: the size of the axis given as -1 is not known yet. "
                f"Call layout.resolve(world_size) first."
            )

    def _why_not(self, world_size: int) -> str:
        """The error for a world these sizes do not fit, with what would fit."""
        known = {axis: size for axis, size in zip(AXES, self.sizes, strict=True) if size != _INFER}
        ranks = prod(known.values())
        if self.is_resolved:
            text = f"{self}, but the world has {_count(world_size)}."
        else:
            factors = " x ".join(f"{axis} {size}" for axis, size in known.items())
            text = (
                f"{self} does not fit a world of {_count(world_size)}: "
                f"{world_size} is not a multiple of {factors} = {ranks}."
            )
        may_be = []
        for axis, size in known.items():
            # Beside a -1, the other sizes stay if they can; else any divisor is worth a thought.
            others = 1 if self.is_resolved or world_size % (ranks // size) else ranks // size
            if world_size % (others * size):
                choices = _join(_nearest(_divisors(world_size // others), size), "or")
                may_be.append(f"{axis} may be {choices}")
        if may_be and world_size > 1:
            text += f" {'; '.join(may_be)}."
        fitting = "; ".join(_times(layout) for layout in self._nearest_layouts(known, world_size))
        multiple = "" if self.is_resolved else "a multiple of "
        return f"{text} Nearest that fit: {fitting}. Or start {multiple}{_count(ranks)}."

    def _nearest_layouts(self, known: dict[str, int], world_size: int) -> list["MeshLayout"]:
        """Layouts for ``world_size`` that change the fewest of the known sizes, by the least."""
        divisors = _divisors(world_size)
        fitting = [
            MeshLayout(**dict(zip(AXES, (*sizes, world_size // prod(sizes)), strict=True)))
            for sizes in product(divisors, repeat=len(AXES) - 1)
            if world_size % prod(sizes) == 0
        ]

        def distance(layout: MeshLayout) -> tuple[int, float]:
            factors = [getattr(layout, axis) / size for axis, size in known.items()]
            return sum(f != 1 for f in factors), sum(abs(log(f)) for f in factors)

        return sorted(fitting, key=distance)[:3]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest(numbers: list[int], to: int, most: int = 12) -> list[int]:
    return sorted(sorted(numbers, key=lambda number: abs(number - to))[:most])


def _times(layout: MeshLayout) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, layout.sizes, strict=True))


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _and(words: Sequence[str]) -> str:
    return _join(words, "and")


def _join(items: Sequence[object], word: str) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"


assert tuple(f.name for f in fields(MeshLayout)) == AXES
