"""Where tokens go: the index arithmetic of routes, against a plain loop; bytes; room."""

import pytest
import torch

from parallel3d.ep.division import Division, capacities, rows_a_pair
from parallel3d.ep.exchange import destinations, routes


def drawn(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + experts)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return order[:, :top_k]


def ways(index: torch.Tensor, division: Division, room: tuple[int, int] | None = None):
    by_token, by_pair = destinations(index, division)
    counts = torch.stack([by_token.sum(1), by_pair.sum(1)], 1)
    if room is not None:
        counts = torch.tensor([room] * division.ranks)
    starts = (counts.cumsum(0) - counts).unbind(1)
    sizes = tuple(counts.sum(0).tolist())
    way = routes(index, division, sizes, starts, room or (index.shape[0], index.numel()))
    return way, counts.tolist()


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(
    ("experts", "ranks", "top_k"), [(8, 4, 3), (6, 4, 2), (5, 5, 1), (4, 2, 4)]
)
def test_each_token_goes_once_to_a_rank(tokens, experts, ranks, top_k) -> None:
    index, division = drawn(tokens, experts, top_k), Division(experts, ranks)
    way, counts = ways(index, division)
    rows, pairs = 0, 0
    for rank, (n_rows, n_pairs) in enumerate(counts):
        mine = [
            (t, k)
            for t in range(tokens)
            for k in range(top_k)
            if index[t, k] // division.chunk == rank
        ]
        sent = way.token_of_row[rows : rows + n_rows].tolist()
        assert sent == sorted({t for t, _ in mine})
        at = slice(pairs, pairs + n_pairs)
        assert way.pair_of[at].tolist() == [t * top_k + k for t, k in mine]
        assert way.expert[at].tolist() == [
            int(index[t, k]) - rank * division.chunk for t, k in mine
        ]
        assert [sent[row] for row in way.row[at].tolist()] == [t for t, _ in mine]
        rows, pairs = rows + n_rows, pairs + n_pairs
    assert way.filled.all()
    assert int(way.dropped) == 0


def test_what_is_no_expert_goes_nowhere() -> None:
    way, counts = ways(torch.tensor([[0, 4], [-1, 3], [9, 9]]), Division(4, 2))
    assert counts == [[1, 1], [1, 1]]
    assert way.token_of_row.tolist() == [0, 1]


def test_room() -> None:
    index = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 2]])
    way, _ = ways(index, Division(4, 2), room=(2, 3))
    # Rank 0 is sent tokens 0 and 1 whole but for its fourth pair; token 2 finds no row there.
    assert way.token_of_row.tolist() == [0, 1, 2, 3]
    assert way.pair_of.tolist() == [0, 1, 2, 5, 6, 7]
    assert way.filled.tolist() == [1] * 6
    assert int(way.dropped) == 2
    empty, _ = ways(torch.zeros(4, 1, dtype=torch.int64), Division(4, 2), room=(3, 3))
    assert empty.filled.tolist() == [1, 1, 1, 0, 0, 0]
    assert empty.expert.tolist() == empty.row.tolist()[3:] + [0] * 3
    assert int(empty.dropped) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_rows_for_each_pair_are_those_of_uniform_routing(ranks) -> None:
    index = drawn(20_000, 128, 8)
    by_token, by_pair = destinations(index, Division(128, ranks))
    assert float(by_token.sum() / by_pair.sum()) == pytest.approx(
        rows_a_pair(128, ranks, 8), rel=0.01
    )
    assert capacities(1000, 8, Division(128, ranks), 1.25)[1] == -(-10_000 // ranks)


def test_division() -> None:
    assert Division(6, 4).by_rank == (2, 2, 2, 0)
    assert Division(7, 4).by_rank == (2, 2, 2, 1)
