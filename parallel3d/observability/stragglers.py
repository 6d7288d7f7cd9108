"""find_stragglers: which coordinates of which axes are slow, from the time that each rank took for itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from statistics import median_low
from typing import Any

from parallel3d.errors import Parallel3dError

_LEAST = 1e-3  # seconds: less is never called slow

Place = tuple[int, ...]


@dataclass(frozen=True)
class Straggler:
    """All ranks at ``coordinates`` are slow.

    Attributes:
        coordinates: axis -> coordinate; of an axis that is not there all ranks are meant.
        times: the fastest of them over the median of all ranks.
        cause: ``"loading data"`` where that makes the difference, else ``"computation"``.
    """

    coordinates: dict[str, int]
    times: float
    cause: str

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {at}" for axis, at in self.coordinates.items())
        loading = ", in loading data" if self.cause == "loading data" else ""
        return f"{where} is {self.times:.1f} x slower than the median{loading}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"axes": self.coordinates, "times": round(self.times, 3), "cause": self.cause}


def find_stragglers(
    own: Sequence[float],
    axes: Mapping[str, int],
    *,
    loading: Sequence[float] | None = None,
    slow: float = 1.2,
) -> list[Straggler]:
    """Names slow ranks by as few coordinates as say it: ``shard 3`` if all ranks there are slow.

    Args:
        own: seconds of a step that each rank took without its waits for others, in the mesh's order.
        axes: name -> size, outermost first.
        loading: seconds of these in which it loaded data.
        slow: how many times the median is slow. Of two ranks the faster is the median.

    Raises:
        Parallel3dError: not a number for each rank, or ``slow`` not above 1.
    """
    places = list(product(*(range(size) for size in axes.values())))
    if len(own) != len(places) or (loading is not None and len(loading) != len(own)):
        raise Parallel3dError(
            f"find_stragglers: {len(own)} times and {len(loading or own)} of loading data for a mesh of "
            f"{dict(axes)}; give one for each of its {len(places)} ranks"
        )
    if not slow > 1:
        raise Parallel3dError(f"find_stragglers: slow is {slow!r}; it must be above 1")
    loading = [0.0] * len(own) if loading is None else loading
    median, usual = median_low(own), median_low(loading)
    left = {
        place: index
        for index, place in enumerate(places)
        if own[index] >= slow * median and own[index] - median >= _LEAST
    }
    found, names = [], list(axes)
    for chosen in _choices(axes):
        whole = len(places) // prod(axes[names[axis]] for axis in chosen)
        for at, mine in sorted(_by_coordinates(left, chosen).items()):
            if len(mine) < whole:
                continue
            for index in mine:
                del left[places[index]]
            # Whether they were slow if they loaded data as fast as the others do.
            slowly = any(own[i] - max(0.0, loading[i] - usual) >= slow * median for i in mine)
            found.append(
                Straggler(
                    dict(zip((names[axis] for axis in chosen), at, strict=True)),
                    min(own[i] for i in mine) / max(median, 1e-9),
                    "computation" if slowly else "loading data",
                )
            )
    return found


def _choices(axes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Sets of the axes longer than 1, small sets first: these leave large parts of the mesh."""
    long = [axis for axis, size in enumerate(axes.values()) if size > 1]
    for count in range(1, len(long) + 1):
        yield from combinations(long, count)


def _by_coordinates(slow: Mapping[Place, int], chosen: Sequence[int]) -> dict[Place, list[int]]:
    """Coordinates on the chosen axes -> slow ranks there."""
    found: dict[Place, list[int]] = defaultdict(list)
    for place, index in slow.items():
        found[tuple(place[axis] for axis in chosen)].append(index)
    return found
