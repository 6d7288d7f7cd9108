"""MeshLayout: the sizes of the mesh axes and the arithmetic of ranks. It imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import wraps
from itertools import product
from math import log, prod

from parallel3d.errors import MeshError, WrongTypeError
from parallel3d.mesh.axes import AXES, DATA_AXES, EXPERT, EXPERT_OF, TABLE

_INFER = -1


@dataclass(frozen=True, repr=False)
class MeshLayout:
    """The sizes of the mesh axes ``(replicate, shard, cp, tp)``, outermost to innermost.

    A plain value: it can be made, compared and printed without a process group. Rank ``r`` has the
    coordinates of ``r`` in a row-major grid of shape ``(replicate, shard, cp, tp)``. With ``cp=1`` there is
    no axis cp, in the mesh, in ``axes`` and ``sizes``, and in what is printed.

    Attributes:
        replicate: copies of the sharded model (HSDP's outer axis); each reads other samples.
        shard: ranks that share one copy's parameters (FSDP); each reads other samples.
        tp: ranks that share each layer's computation; all of them read the same samples.
        cp: ranks that share each sequence (context parallelism): they read the same samples, and each
            computes a part of the tokens. Parameters are sharded over shard x cp. By keyword only.
        ep: ranks that share the experts of one copy (expert parallelism), neighbours of shard x cp x tp,
            which it divides: a second view (replicate, efsdp, ep) of the same ranks, with efsdp =
            shard x cp x tp / ep. It changes neither the world nor who reads what. By keyword only.

    Give sizes by keyword; replicate, shard and tp can also be given by position, in this order. At most one
    of them, but not ep, may be ``-1``: it is inferred from the world size, see :meth:`resolve`.

    Raises:
        MeshError: a size is no int, or is 0 or below -1; two sizes are -1; or ep doesn't divide
            shard x cp x tp.
        WrongTypeError: a name that is no axis, or a fourth size by position.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = field(default=1, kw_only=True)
    ep: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for axis in (*AXES, EXPERT.name):
            size = getattr(self, axis)
            if type(size) is not int:
                raise MeshError(
                    f"{axis}={size!r} is a {type(size).__name__}: the size of a mesh axis is an "
                    f"int, 1 or more, or -1 to infer it from the world size."
                )
            if size < 1 and size != _INFER:
                raise MeshError(
                    f"{axis}={size}: the size of a mesh axis is 1 or more (1 switches the axis "
                    f"off), or -1 to infer it from the world size."
                )
        inferred = [axis for axis, size in self.as_dict().items() if size == _INFER]
        if len(inferred) > 1:
            raise MeshError(
                f"{_join(inferred, 'and')} are -1: only one axis can be inferred from the world size. "
                f"Give all but one of them a size, for example {inferred[-1]}=1."
            )
        if self.ep == _INFER:
            raise MeshError(
                "ep is -1: it can't be inferred, as it is no factor of the world size. Give it a divisor of "
                "shard x cp x tp, such as the ranks of a machine."
            )
        if not inferred and self.ranks_of_a_copy % self.ep:
            sizes = {axis: getattr(self, axis) for axis in EXPERT_OF}
            raise MeshError(
                f"ep={self.ep} doesn't divide {' x '.join(f'{a} {n}' for a, n in sizes.items())} = "
                f"{self.ranks_of_a_copy}, whose ranks share the experts; it may be "
                f"{_join(_divisors(self.ranks_of_a_copy), 'or')}."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that the mesh has, outermost first; cp is one of them unless it is 1."""
        return tuple(a.name for a in TABLE if a.in_mesh_if_one or getattr(self, a.name) != 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of ``axes`` as given, possibly with one -1: the shape of the mesh."""
        return tuple(getattr(self, axis) for axis in self.axes)

    def as_dict(self, *, views: bool = False) -> dict[str, int]:
        """Returns ``axes`` and ``sizes``: ``{"replicate": 2, "shard": 4, "tp": 1}``; with ``views`` also ep,
        unless it is 1: the arguments that make this layout."""
        more = {EXPERT.name: self.ep} if views and self.ep != 1 else {}
        return dict(zip(self.axes, self.sizes, strict=True)) | more

    @property
    def ranks_of_a_copy(self) -> int:
        """The number of ranks that share one copy's parameters: ``shard * cp * tp``; ep divides it."""
        return prod(getattr(self, axis) for axis in EXPERT_OF)

    @property
    def is_resolved(self) -> bool:
        """Whether no size is -1."""
        return _INFER not in self.sizes

    @property
    def world_size(self) -> int:
        """The number of ranks: ``replicate * shard * cp * tp``.

        Raises:
            MeshError: an axis is still -1.
        """
        self._require_resolved()
        return prod(self.sizes)

    @property
    def data_size(self) -> int:
        """The number of ranks that read different samples: ``replicate * shard``.

        Raises:
            MeshError: an axis is still -1.
        """
        self._require_resolved()
        return prod(getattr(self, axis) for axis in DATA_AXES)

    def resolve(self, world_size: int) -> "MeshLayout":
        """Returns this layout for ``world_size`` ranks, with -1 replaced by the inferred size.

        Raises:
            MeshError: the sizes do not multiply to ``world_size``, or do not divide it.
        """
        if type(world_size) is not int or world_size < 1:
            raise MeshError(f"world_size is {world_size!r}; it must be an int, 1 or more")
        known = prod(size for size in self.sizes if size != _INFER)
        if known != world_size if self.is_resolved else world_size % known:
            raise MeshError(self._why_not(world_size))
        if self.is_resolved:
            return self
        rest = world_size // known
        return replace(
            self, **{axis: rest for axis, size in self.as_dict().items() if size == _INFER}
        )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of ``rank`` on ``axes``: ``{"replicate": i, "shard": j, "tp": k}``.

        Raises:
            MeshError: ``rank`` is not in ``range(world_size)``, or an axis is still -1.
        """
        world_size = self.world_size
        if type(rank) is not int or not 0 <= rank < world_size:
            raise MeshError(f"rank {rank!r} is not in {self}: ranks go from 0 to {world_size - 1}.")
        return {axis: rank // self.stride(axis) % getattr(self, axis) for axis in self.axes}

    def rank(self, **at: int) -> int:
        """Returns the rank at these coordinates, the inverse of :meth:`coordinates`.

        Args:
            at: ``replicate``, ``shard``, ``cp``, ``tp``; by default 0.

        Raises:
            MeshError: a coordinate is outside its axis, an axis is unknown or still -1.
        """
        rank = 0
        for axis, coordinate in at.items():
            stride, size = self.stride(axis), getattr(self, axis)
            if type(coordinate) is not int or not 0 <= coordinate < size:
                raise MeshError(
                    f"{axis} coordinate {coordinate!r} is not in {self}: "
                    f"coordinates on {axis} go from 0 to {size - 1}."
                )
            rank += stride * coordinate
        self._require_resolved()
        return rank

    def stride(self, axis: str) -> int:
        """Returns the difference of rank between neighbours on ``axis``.

        Raises:
            MeshError: an unknown axis, or an axis that is still -1.
        """
        if axis == EXPERT.name:
            return 1
        if axis not in AXES:
            raise MeshError(_no_axis(axis))
        self._require_resolved()
        return prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Returns the groups of ranks of ``axis``, which differ in this coordinate only.

        Args:
            axis: ``"replicate"``, ``"shard"``, ``"cp"``, ``"tp"`` or ``"ep"``.

        Returns:
            ``world_size / size of axis`` tuples of ranks, each in the order of the axis, sorted by
            their first rank. Together they hold every rank once.

        Raises:
            MeshError: an unknown axis, or an axis that is still -1.
        """
        stride, size = self.stride(axis), getattr(self, axis)
        firsts = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return [tuple(range(first, first + stride * size, stride)) for first in firsts]

    def data_rank(self, rank: int) -> int:
        """Returns which of the ``data_size`` parts of the data ``rank`` reads.

        The ranks of one ``cp`` or ``tp`` group read the same part; ``replicate`` and ``shard`` read others.

        Raises:
            MeshError: ``rank`` is not in ``range(world_size)``, or an axis is still -1.
        """
        at, number = self.coordinates(rank), 0
        for axis in DATA_AXES:
            number = number * getattr(self, axis) + at[axis]
        return number

    def __repr__(self) -> str:
        sizes = self.as_dict(views=True)
        return f"MeshLayout({', '.join(f'{axis}={size}' for axis, size in sizes.items())})"

    def __str__(self) -> str:
        text = f"{_times(self)} = {_count(prod(self.sizes))}" if self.is_resolved else _times(self)
        return text if self.ep == 1 else f"{text}, ep {self.ep}"

    def _require_resolved(self) -> None:
        if not self.is_resolved:
            raise MeshError(
                f"{self} is not resolved: the size of the axis given as -1 is not known yet. "
                f"Call layout.resolve(world_size) first."
            )

    def _why_not(self, world_size: int) -> str:
        """Returns the error message for a world size that doesn't fit, with sizes and layouts that would."""
        known = {axis: size for axis, size in self.as_dict().items() if size != _INFER}
        ranks = prod(known.values())
        if self.is_resolved:
            text = f"The layout is {self}, but the world has {_count(world_size)}."
        else:
            factors = " x ".join(f"{axis} {size}" for axis, size in known.items())
            text = (
                f"{self} does not fit a world of {_count(world_size)}: "
                f"{world_size} is not a multiple of {factors} = {ranks}."
            )
        choices = []
        for axis, size in known.items():
            # Beside a -1 the other sizes stay if they can; else any divisor is a choice.
            others = 1 if self.is_resolved or world_size % (ranks // size) else ranks // size
            if world_size % (others * size) and world_size > 1:
                nearest = sorted(_divisors(world_size // others), key=lambda n: abs(n - size))[:12]
                choices.append(f"{axis} may be {_join(sorted(nearest), 'or')}")
        if choices:
            text += f" {'; '.join(choices)}."
        fitting = "; ".join(
            _times(layout) for layout in _nearest_layouts(self.axes, known, world_size)
        )
        multiple = "" if self.is_resolved else "a multiple of "
        return f"{text} Nearest that fit: {fitting}. Or start {multiple}{_count(ranks)}."


_set_sizes = MeshLayout.__init__


@wraps(_set_sizes)
def _init(self: MeshLayout, *args: int, **sizes: int) -> None:
    by_position = [each.name for each in fields(MeshLayout) if not each.kw_only]
    if len(args) > len(by_position):
        rest = [axis for axis in (*AXES, EXPERT.name) if axis not in by_position]
        raise WrongTypeError(
            f"MeshLayout was given {len(args)} sizes by position, and takes {_join(by_position, 'and')} so: "
            f"give {_join([f'{axis}=' for axis in rest], 'and')} by keyword, best all of them"
        )
    for name in sizes:
        if name not in (*AXES, EXPERT.name):
            raise WrongTypeError(_no_axis(name))
    _set_sizes(self, *args, **sizes)


MeshLayout.__init__ = _init  # type: ignore[method-assign]


def _no_axis(name: str) -> str:
    known = (*AXES, EXPERT.name)
    near = get_close_matches(str(name), known, n=1)
    meant = f"; did you mean {near[0]}?" if near else "."
    return f"{name} is no axis{meant} The axes are {', '.join(known)}"


def _nearest_layouts(
    axes: Sequence[str], known: dict[str, int], world_size: int
) -> list[MeshLayout]:
    """Returns layouts for ``world_size`` that change the fewest of the ``known`` sizes, by the least."""
    fitting = [
        MeshLayout(**dict(zip(axes, (*sizes, world_size // prod(sizes)), strict=True)))
        for sizes in product(_divisors(world_size), repeat=len(axes) - 1)
        if world_size % prod(sizes) == 0
    ]

    def distance(layout: MeshLayout) -> tuple[int, float]:
        factors = [getattr(layout, axis) / size for axis, size in known.items()]
        return sum(f != 1 for f in factors), sum(abs(log(f)) for f in factors)

    return sorted(fitting, key=distance)[:3]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _times(layout: MeshLayout) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in layout.as_dict().items())


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _join(items: Sequence[object], word: str) -> str:
    *head, last = map(str, items)
    return f"{', '.join(head)} {word} {last}" if head else last


assert {f.name for f in fields(MeshLayout)} == {*AXES, EXPERT.name}
