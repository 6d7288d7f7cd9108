"""find_stragglers: finds slow coordinates of mesh axes from the time each rank took without waits."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import prod
from statistics import median_low
from typing import Any

from parallel3d.errors import Parallel3dError

_LEAST = 1e-3  # seconds above the median below which no rank is slow

Place = tuple[int, ...]


@dataclass(frozen=True)
class Straggler:
    """A part of the mesh whose ranks are all slow.

    Attributes:
        coordinates: axis -> coordinate; on axes that are absent, all ranks.
        times: the time of the fastest of them divided by the median of all ranks.
        cause: ``"loading data"`` if they would not be slow with the median's time for that, else
            ``"computation"``.
    """

    coordinates: dict[str, int]
    times: float
    cause: str

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {at}" for axis, at in self.coordinates.items())
        loading = ", in loading data" if self.cause == "loading data" else ""
        return f"{where} is {self.times:.1f} x slower than the median{loading}"

    def to_dict(self) -> dict[str, Any]:
        return {"axes": self.coordinates, "times": round(self.times, 3), "cause": self.cause}


def find_stragglers(
    own: Sequence[float],
    axes: Mapping[str, int],
    *,
    loading: Sequence[float] | None = None,
    slow: float = 1.2,
) -> list[Straggler]:
    """Returns the slow ranks, by as few coordinates as possible: ``shard 3`` if all ranks there are slow.

    Args:
        own: each rank's seconds of a step without its waits for others, in the mesh's order.
        axes: name -> size, outermost first.
        loading: how many of these seconds each rank loaded data.
        slow: a rank is slow if its seconds are at least this many times the median. The median of two ranks
            is the faster one.

    Raises:
        Parallel3dError: there is not one number for each rank, or ``slow`` is not above 1.
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
    stragglers, names = [], list(axes)
    long = [axis for axis, size in enumerate(axes.values()) if size > 1]
    # Few axes first, as they name large parts of the mesh.
    for chosen in chain.from_iterable(combinations(long, n) for n in range(1, len(long) + 1)):
        size = len(places) // prod(axes[names[axis]] for axis in chosen)
        by_coordinates: dict[Place, list[int]] = defaultdict(list)
        for place, index in left.items():
            by_coordinates[tuple(place[axis] for axis in chosen)].append(index)
        for at, ranks in sorted(by_coordinates.items()):
            if len(ranks) < size:
                continue
            for rank in ranks:
                del left[places[rank]]
            # Whether they would be slow if they loaded data as fast as the median.
            slowly = any(own[i] - max(0.0, loading[i] - usual) >= slow * median for i in ranks)
            stragglers.append(
                Straggler(
                    dict(zip((names[axis] for axis in chosen), at, strict=True)),
                    min(own[i] for i in ranks) / max(median, 1e-9),
                    "computation" if slowly else "loading data",
                )
            )
    return stragglers
