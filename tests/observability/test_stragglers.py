"""Slow ranks are named by as few coordinates as say it."""

import itertools

import pytest

from parallel3d.errors import Parallel3dError
from parallel3d.observability import find_stragglers

AXES = {"replicate": 2, "shard": 4, "tp": 2}
PLACES = list(itertools.product(range(2), range(4), range(2)))


def times(slow: dict[tuple[int, int, int], float]) -> list[float]:
    """A second for each rank but those in ``slow``, with a little noise."""
    return [slow.get(place, 1.0 + 0.01 * (i % 5)) for i, place in enumerate(PLACES)]


def named(own: list[float], **options: object) -> list[dict[str, int]]:
    return [s.coordinates for s in find_stragglers(own, AXES, **options)]  # type: ignore[arg-type]


def test_none() -> None:
    assert named(times({})) == []
    assert named([0.0] * 16) == []
    assert named(times(dict.fromkeys(PLACES, 2.0))) == []  # all alike


def test_a_coordinate_of_one_axis() -> None:
    (found,) = find_stragglers(times({p: 1.43 for p in PLACES if p[1] == 3}), AXES)
    assert found.coordinates == {"shard": 3} and found.times == pytest.approx(1.4, abs=0.05)
    assert str(found) == "shard 3 is 1.4 x slower than the median"
    assert found.to_dict()["axes"] == {"shard": 3} and found.cause == "computation"


def test_one_rank() -> None:
    assert named(times({(1, 2, 0): 3.0})) == [{"replicate": 1, "shard": 2, "tp": 0}]


def test_a_node_and_another_rank() -> None:
    """Large parts first, and no rank twice."""
    slow = {p: 2.0 for p in PLACES if p[:2] == (0, 1)} | {(1, 3, 1): 1.5}
    assert named(times(slow)) == [
        {"replicate": 0, "shard": 1},
        {"replicate": 1, "shard": 3, "tp": 1},
    ]


def test_many_ranks_of_a_large_mesh() -> None:
    """199 of the 256 ranks of a replica: 24 whole rows of tp, and 7 of the next."""
    axes = {"replicate": 16, "shard": 32, "tp": 8}
    own = [1.0] * 4096
    own[512 : 512 + 199] = [2.0] * 199
    found = [each.coordinates for each in find_stragglers(own, axes)]
    assert found == [{"replicate": 2, "shard": at} for at in range(24)] + [
        {"replicate": 2, "shard": 24, "tp": at} for at in range(7)
    ]
    own[::9] = [3.0] * len(own[::9])  # nearly 500 more, here and there
    found = [each.coordinates for each in find_stragglers(own, axes)]
    assert found[:25] == [{"replicate": 2, "shard": at} for at in range(25)]
    assert all(len(each) == 3 for each in found[25:]) and len(found) == 25 + 433


def test_two_coordinates_of_an_axis() -> None:
    assert named(times({p: 2.0 for p in PLACES if p[1] in (0, 2)})) == [{"shard": 0}, {"shard": 2}]


def test_axes_of_one_rank_are_not_named() -> None:
    (found,) = find_stragglers([1.0, 1.0, 1.3], {"replicate": 1, "shard": 3, "tp": 1})
    assert found.coordinates == {"shard": 2}
    (found,) = find_stragglers([2.0, 1.0], {"shard": 2})  # of two the faster is the median
    assert found.coordinates == {"shard": 0} and found.times == 2.0


def test_loading_data() -> None:
    own = times({p: 2.0 for p in PLACES if p[1] == 3})
    loading = [0.9 if place[1] == 3 else 0.01 for place in PLACES]
    (found,) = find_stragglers(own, AXES, loading=loading)
    assert found.cause == "loading data" and str(found).endswith("median, in loading data")


def test_loading_data_alone() -> None:
    """Where nothing is computed, or next to nothing, what is slow is loading."""
    own = [0.1, 0.1, 0.1, 0.3]
    for computing in (0.0, 1e-6):
        loading = [t - computing * (i + 1) for i, t in enumerate(own)]
        (found,) = find_stragglers(own, {"shard": 4}, loading=loading)
        assert found.cause == "loading data"


def test_threshold() -> None:
    own = times({p: 1.15 for p in PLACES if p[1] == 3})
    assert named(own) == [] and named(own, slow=1.05) == [{"shard": 3}]
    with pytest.raises(Parallel3dError, match="slow is 1"):
        find_stragglers(own, AXES, slow=1)
    with pytest.raises(Parallel3dError, match=r"3 times .* of its 16 ranks"):
        find_stragglers([1.0] * 3, AXES)
