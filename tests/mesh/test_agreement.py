"""check_agreement between threads that play ranks over one store."""

import re
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch import distributed as dist

from parallel3d._torch import simulated
from parallel3d.errors import AgreementError, StateError
from parallel3d.mesh import check_agreement

SHORT = timedelta(seconds=0.5)
LONG = timedelta(seconds=20)  # never reached when all is well

Clients = Callable[[int], dist.Store]


@pytest.fixture(scope="module")
def connections() -> list[dist.Store]:
    """A TCP store and six clients of it; made once, as connecting can take seconds."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Each rank needs a connection of its own: one that waits blocks its other users.
    clients = [dist.TCPStore("127.0.0.1", master.port, wait_for_workers=False) for _ in range(6)]
    return [*clients, master]


@pytest.fixture(params=["hash", "tcp"])
def clients(request) -> Clients:
    """A function from a rank to its connection to one empty store."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda rank: store
    stores = request.getfixturevalue("connections")
    return lambda rank: dist.PrefixStore(request.node.name, stores[rank])


def play(
    clients: Clients, values: dict[int, dict[str, str]], world_size: int, calls: int = 1, **options
) -> dict[int, list[str | None]]:
    """Runs check_agreement in a thread per rank; returns each call's error text by rank."""
    outcome: dict[int, list[str | None]] = {rank: [] for rank in values}

    def run(rank: int) -> None:
        store = clients(rank)
        for _ in range(calls):
            try:
                check_agreement(
                    "plan",
                    values[rank],
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    **({"timeout": LONG} | options),
                )
            except AgreementError as error:
                outcome[rank].append(str(error))
            else:
                outcome[rank].append(None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcome


def the_error(outcome: dict[int, list[str | None]]) -> str:
    """The one error text, which all ranks must have raised."""
    texts = {text for texts in outcome.values() for text in texts}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text is not None
    return text


def test_equal_values_agree(clients) -> None:
    start = time.monotonic()
    outcome = play(clients, {rank: {"a": "1", "b": "x"} for rank in range(4)}, 4)
    assert outcome == {rank: [None] for rank in range(4)}
    assert time.monotonic() - start < 5


def test_order_of_names_does_not_matter(clients) -> None:
    outcome = play(clients, {0: {"a": "1", "b": "2"}, 1: {"b": "2", "a": "1"}}, 2)
    assert outcome == {0: [None], 1: [None]}


SAME = {"layout": "tp 2", "equal": "s"}
DIFFERENCES: dict[str, tuple[list[dict[str, str]], list[str]]] = {
    **{
        f"rank {odd}": (
            [{**SAME, "layout": "tp 4"} if rank == odd else SAME for rank in range(5)],
            [
                f"'plan': rank {odd} differs from the majority",
                rf"layout: tp 2 on ranks .*; tp 4 on rank {odd}",
            ],
        )
        for odd in (0, 2, 4)
    },
    "every setting and rank": (
        [{"a": a, "b": b} for a, b in ("11", "21", "11", "11", "13", "14")],
        [
            "ranks 1, 4-5 differ from the majority",
            "a: 1 on ranks 0, 2-5; 2 on rank 1",
            "b: 1 on ranks 0-3; 3 on rank 4; 4 on rank 5",
        ],
    ),
    "a setting that only some have": (
        [{}, {"a": "1"}, {}],
        [r"a: \(not set\) on ranks 0, 2; 1 on rank 1", "rank 1 differs"],
    ),
    "no majority": (
        [{"a": "1"}, {"a": "2"}],
        ["no value has a majority", "a: 1 on rank 0; 2 on rank 1"],
    ),
}


@pytest.mark.parametrize("which", DIFFERENCES)
def test_differences_are_named_on_every_rank(clients, which: str) -> None:
    values, says = DIFFERENCES[which]
    text = the_error(play(clients, dict(enumerate(values)), len(values)))
    assert all(re.search(each, text) for each in says), text
    assert "equal" not in text


def test_long_values_show_where_they_differ() -> None:
    store = dist.HashStore()
    base = [f"layers.{i}: colwise" for i in range(200)]
    other = [*base[:150], "layers.150: rowwise", *base[151:]]
    values = {0: {"plan": ", ".join(base)}, 1: {"plan": ", ".join(other)}}
    text = the_error(play(lambda rank: store, values, 2))
    assert "layers.150: rowwise" in text and "layers.150: colwise" in text
    assert len(text) < 800


@pytest.mark.parametrize("missing", [1, 3])
def test_missing_rank_is_named(clients, missing) -> None:
    start = time.monotonic()
    values = {rank: {"a": "1"} for rank in range(4) if rank != missing}
    text = the_error(play(clients, values, 4, timeout=SHORT))
    assert f"rank {missing} of 4 did not report 'plan' within 0.5 s" in text
    assert time.monotonic() - start < 10


def test_missing_rank_and_a_difference(clients) -> None:
    text = the_error(play(clients, {0: {"a": "1"}, 1: {"a": "2"}}, 4, timeout=SHORT))
    assert "ranks 2-3 of 4 did not report" in text
    assert "a: 1 on rank 0; 2 on rank 1" in text


def test_rank_0_missing(clients) -> None:
    outcome = play(clients, {1: {"a": "1"}, 2: {"a": "1"}}, 3, timeout=SHORT)
    for rank, (text,) in outcome.items():
        assert text is not None and text.startswith("rank 0 did not report 'plan' within 0.5 s")
        assert f"rank {rank} " in text


def test_late_rank_gets_the_same_error() -> None:
    store = dist.HashStore()
    early = the_error(play(lambda rank: store, {0: {"a": "1"}, 1: {"a": "1"}}, 3, timeout=SHORT))
    late = the_error(play(lambda rank: store, {2: {"a": "1"}}, 3, timeout=SHORT))
    assert early == late


def test_early_rank_waits_for_rank_0s_verdict() -> None:
    # Rank 1 is 0.6 of a timeout ahead of rank 0, which then waits a whole one for rank 2.
    store = dist.HashStore()

    def slow_start(rank: int) -> dist.Store:
        time.sleep(0.6 if rank == 0 else 0)
        return store

    values = {0: {"a": "1"}, 1: {"a": "1"}}
    text = the_error(play(slow_start, values, 3, timeout=timedelta(seconds=1)))
    assert "rank 2 of 3 did not report" in text


def test_store_that_goes_away() -> None:
    host = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    connected = threading.Event()

    def client(rank: int) -> dist.Store:
        store = dist.TCPStore("127.0.0.1", host[0].port, wait_for_workers=False)
        connected.set()
        return store

    outcome: dict[int, list[str | None]] = {}
    thread = threading.Thread(target=lambda: outcome.update(play(client, {1: {"a": "1"}}, 2)))
    thread.start()
    connected.wait(10)
    time.sleep(0.2)
    host.clear()  # ends the server
    thread.join(15)
    assert not thread.is_alive()
    assert "rank 1 lost the store" in the_error(outcome)


def test_repeated_calls_do_not_see_each_other(clients) -> None:
    values = {rank: {"a": "1"} for rank in range(3)}
    assert play(clients, values, 3, calls=5) == {rank: [None] * 5 for rank in range(3)}
    values[2] = {"a": "2"}
    the_error(play(clients, values, 3, calls=3))
    values[2] = {"a": "1"}
    assert play(clients, values, 3) == {rank: [None] for rank in range(3)}


def test_topics_are_apart() -> None:
    # Rank 0 has made two calls about another topic when they meet at this one.
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(AgreementError, match=r"rank 1 of 2 did not report 'other'"):
            check_agreement(
                "other", {}, store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.05)
            )
    assert play(lambda rank: store, {0: {"a": "1"}, 1: {"a": "1"}}, 2) == {0: [None], 1: [None]}


def test_warn_only_differences_are_a_warning() -> None:
    store = dist.HashStore()
    values = {rank: {"a": "1", "NCCL_X": "0"} for rank in range(3)}
    values[1]["NCCL_X"] = "7"
    with pytest.warns(UserWarning, match=r"rank 1 differs") as caught:
        outcome = play(lambda rank: store, values, 3, warn_only=["NCCL_X"])
    assert outcome == {rank: [None] for rank in range(3)}
    assert len(caught) == 1  # from rank 0
    assert "NCCL_X: 0 on ranks 0, 2; 7 on rank 1" in str(caught[0].message)


def test_warning_beside_an_error() -> None:
    store = dist.HashStore()
    values = {0: {"a": "1", "NCCL_X": "0"}, 1: {"a": "2"}}
    with pytest.warns(UserWarning, match="NCCL_X"):
        text = the_error(play(lambda rank: store, values, 2, warn_only=["NCCL_X"]))
    assert "NCCL_X" not in text


def test_name_is_tolerated_when_one_rank_tolerates_it() -> None:
    # A variable set on one rank only is in that rank's list only.
    store = dist.HashStore()

    def run(rank: int, value: dict[str, str]) -> None:
        check_agreement(
            "mesh", value, warn_only=list(value), store=store, rank=rank, world_size=2, timeout=LONG
        )

    thread = threading.Thread(target=run, args=(1, {"GLOO_X": "1"}))
    thread.start()
    with pytest.warns(UserWarning, match=r"GLOO_X: \(not set\) on rank 0; 1 on rank 1"):
        run(0, {})
    thread.join(10)
    assert not thread.is_alive()


def test_one_rank_has_nobody_to_ask() -> None:
    store = dist.HashStore()
    check_agreement("plan", {"a": "1"}, store=store, rank=0, world_size=1)
    assert store.num_keys() == 0


def test_fake_group_and_simulated_ranks_do_nothing() -> None:
    dist.init_process_group("fake", rank=3, world_size=8)
    try:
        check_agreement("plan", {"a": "1"}, timeout=timedelta(seconds=0.01))
        with simulated.LocalTensorMode(8):
            check_agreement("plan", {"a": "1"}, timeout=timedelta(seconds=0.01))
    finally:
        dist.destroy_process_group()


def test_without_group_or_store() -> None:
    with pytest.raises(StateError, match="process group"):
        check_agreement("plan", {})
    with pytest.raises(StateError, match="rank= and world_size="):
        check_agreement("plan", {}, store=dist.HashStore())


def test_default_group_of_one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_agreement("plan", {"a": "1"})
    finally:
        dist.destroy_process_group()


def test_repeated_calls_leave_nothing_in_the_store(clients) -> None:
    """``check_execution_order`` makes several in each step."""
    values = {rank: {"a": "1"} for rank in range(3)}
    play(clients, values, 3)
    before = clients(0).num_keys()
    assert play(clients, values, 3, calls=5)[2] == [None] * 5
    assert clients(0).num_keys() == before
