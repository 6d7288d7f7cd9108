"""GlooPool: results, errors, hanging ranks, and that the pool survives them."""

import os
import pickle
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.errors import MeshError, Parallel3dError, StateError
from parallel3d.testing import GlooPool, WorkerError, WorkerTimeout
from parallel3d.testing import gloo_pool as pools


def total(offset: int) -> tuple[int, int, torch.Tensor]:
    t = torch.tensor([offset + dist.get_rank()])
    dist.all_reduce(t)
    return dist.get_rank(), dist.get_world_size(), t


def over_axes() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    x = torch.tensor([10.0 ** dist.get_rank()])
    for axis in ("a", "c"):
        dist.all_reduce(x, group=mesh.get_group(axis))
    return x.tolist()


def surroundings() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1).item(),
        "dtype": torch.get_default_dtype(),
        "env": (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]),
        "backend": dist.get_backend(),
    }


def spoil() -> None:
    torch.rand(7)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.barrier()  # else one rank closes the connections that another still makes
    dist.destroy_process_group()


class CustomError(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def fail(rank: int, how: str, hang: bool) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise KeyError("the key")
        if how == "custom":
            raise CustomError(1, 2)
        if how == "exit":
            raise SystemExit(5)
        os.kill(os.getpid(), signal.SIGKILL)
    if hang:
        dist.barrier()


def fail_everywhere() -> None:
    raise ValueError("everywhere")


def sleep(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def unpicklable() -> object:
    return lambda: None


def echo(value: object) -> object:
    return value


@pytest.mark.parametrize("size", range(1, 9))
def test_every_world_size(gloo_pool: GlooPool, size: int) -> None:
    expected = torch.tensor([size * 100 + size * (size - 1) // 2])
    results = gloo_pool.run(total, 100, world_size=size)
    assert [(rank, world) for rank, world, _ in results] == [(r, size) for r in range(size)]
    assert all(torch.equal(t, expected) for *_, t in results)


def test_all_workers_by_default_and_meshes_over_them(gloo_pool: GlooPool) -> None:
    low, high = [110011.0], [11001100.0]
    assert gloo_pool.run(over_axes) == [low, low, high, high] * 2


def test_workers_live_on_and_runs_do_not_see_each_other(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(surroundings, world_size=2)
    gloo_pool.run(spoil, world_size=2)
    assert gloo_pool.run(surroundings, world_size=2) == before
    assert [r["env"] for r in before] == [("0", "0", "2"), ("1", "1", "2")]
    assert {r["threads"] for r in before} == {1}
    assert {r["backend"] for r in before} == {"gloo"}


def threads_after_a_cycle() -> int:
    """A group that garbage keeps, as a trained model's cycles do."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    dist.all_reduce(torch.ones(1), group=mesh.get_group("a"))
    cycle = [mesh, dist.new_group([0, 1])]
    cycle.append(cycle)
    return len(os.listdir("/proc/self/task"))


@pytest.mark.smoke
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_groups_end_with_their_run(gloo_pool: GlooPool) -> None:
    first, *_ = [gloo_pool.run(threads_after_a_cycle, world_size=2) for _ in range(3)]
    assert gloo_pool.run(threads_after_a_cycle, world_size=2) == first


_kept: list[object] = []


def keep_groups() -> int:
    """Groups that outlive their run, as what torch keeps of an exception may make them."""
    _kept.extend(dist.new_group([0, 1]) for _ in range(8))
    return os.getpid()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_a_worker_with_threads_of_runs_gone_by_is_replaced(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(keep_groups, world_size=2)
    after = [r["pid"] for r in gloo_pool.run(surroundings, world_size=2)]
    assert not set(after) & set(before)


def test_values_are_copies(gloo_pool: GlooPool) -> None:
    value = torch.arange(3)
    (result,) = gloo_pool.run(echo, value, world_size=1)
    result[0] = 7
    assert value.tolist() == [0, 1, 2]
    assert not result.is_shared()


@pytest.mark.parametrize("hang", [False, True])
def test_a_failing_rank(gloo_pool: GlooPool, hang: bool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 failed first: KeyError: 'the key'") as caught:
        gloo_pool.run(fail, 1, "raise", hang, world_size=3)
    assert time.monotonic() - start < 6
    error = caught.value
    assert list(error.failures) == [1]
    assert error.unfinished == ([0, 2] if hang else [])
    assert 'raise KeyError("the key")' in str(error)
    assert pools.__file__ not in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert gloo_pool.run(total, 0, world_size=3)[0][2].item() == 3


@pytest.mark.slow
def test_only_ended_workers_are_replaced(gloo_pool: GlooPool) -> None:
    before = [r["pid"] for r in gloo_pool.run(surroundings, world_size=4)]
    with pytest.raises(WorkerError):
        gloo_pool.run(fail, 1, "raise", True, world_size=3)
    after = [r["pid"] for r in gloo_pool.run(surroundings, world_size=4)]
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, False, True]
    for pid in (before[0], before[2]):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_dying_process_is_named_first(gloo_pool: GlooPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 2 failed first: process died .* -9") as caught:
        gloo_pool.run(fail, 2, "kill", True, world_size=3)
    assert caught.value.failures[2].died
    assert len(gloo_pool.run(total, 0, world_size=3)) == 3


def test_a_worker_without_a_group_ends(monkeypatch) -> None:
    """torch counts groups that could not be made: the next would have a name that no other rank knows."""

    class Pipe:
        sent: typing.ClassVar[list[str]] = []

        def send_bytes(self, data: bytes) -> None:
            self.sent.append(pickle.loads(data)[0])

        def recv_bytes(self) -> bytes:
            return pools.RELEASE

    def broken(job: object) -> None:
        raise RuntimeError("connectFullMesh failed")

    monkeypatch.setattr(pools, "_start_group", broken)
    job = pools.Job(0, 1, "", 1.0, (), ("", None), b"")
    with pytest.raises(EOFError):
        pools._run(Pipe(), job)
    assert Pipe.sent == ["failed"]


def test_an_exit_does_not_end_the_worker(gloo_pool: GlooPool) -> None:
    before = [r["pid"] for r in gloo_pool.run(surroundings, world_size=1)]
    with pytest.raises(WorkerError, match="SystemExit: 5"):
        gloo_pool.run(fail, 0, "exit", False, world_size=1)
    assert [r["pid"] for r in gloo_pool.run(surroundings, world_size=1)] == before


def test_ranks_that_fail_alike_share_a_traceback(gloo_pool: GlooPool) -> None:
    with pytest.raises(WorkerError) as caught:
        gloo_pool.run(fail_everywhere, world_size=4)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert str(caught.value).count("Traceback") == 1


def test_an_exception_that_cannot_be_rebuilt_here(gloo_pool: GlooPool) -> None:
    with pytest.raises(WorkerError, match="CustomError: 1 and 2") as caught:
        gloo_pool.run(fail, 0, "custom", False, world_size=1)
    assert caught.value.failures[0].exception is None
    assert caught.value.__cause__ is None


def test_a_hanging_rank_runs_into_the_timeout(gloo_pool: GlooPool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"not finished after 1 s on rank\(s\) 1$") as caught:
        gloo_pool.run(sleep, 1, world_size=3, timeout=1)
    assert time.monotonic() - start < 5
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.unfinished == [1]
    assert len(gloo_pool.run(total, 0, world_size=3)) == 3


def test_what_cannot_be_sent(gloo_pool: GlooPool) -> None:
    with pytest.raises(Parallel3dError, match="top level of a module"):
        gloo_pool.run(lambda: None)
    with pytest.raises(Parallel3dError, match="arguments"):
        gloo_pool.run(echo, lambda: None)
    with pytest.raises(WorkerError, match=r"rank 0 failed first: .*pickle"):
        gloo_pool.run(unpicklable, world_size=1)


def test_bad_arguments(gloo_pool: GlooPool) -> None:
    for bad in (0, 9, -1, 2.0, True):
        with pytest.raises(MeshError, match="from 1 to 8"):
            gloo_pool.run(total, 0, world_size=bad)  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match="timeout=0"):
        gloo_pool.run(total, 0, timeout=0)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(MeshError, match="size="):
            GlooPool(bad)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="threads="):
            GlooPool(1, threads=bad)  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match="start_method='fork'"):
        GlooPool(1, start_method="fork")


def test_a_function_of_a_module_found_only_by_its_file(
    gloo_pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p3d_only_a_file.py"
    path.write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import p3d_only_a_file

    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    assert gloo_pool.run(p3d_only_a_file.answer, world_size=1) == [42]


@pytest.mark.slow
def test_spawn_and_closing() -> None:
    with GlooPool(2, threads=2, start_method="spawn") as pool:
        results = pool.run(surroundings)
    assert {r["threads"] for r in results} == {2}
    for r in results:
        with pytest.raises(ProcessLookupError):
            os.kill(r["pid"], 0)
    with pytest.raises(StateError, match="closed"):
        pool.run(surroundings)
    pool.close()


ORPHANS = """
import os, sys, time
from parallel3d.testing import GlooPool

def report_and_hang():
    os.write(1, b"hanging\\n")
    time.sleep(1000)

if __name__ == "__main__":
    GlooPool(2).run(report_and_hang)
"""


@pytest.mark.slow
def test_workers_end_with_the_process_of_their_pool(tmp_path: Path) -> None:
    """Also a function of a script's ``__main__`` runs."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        try:
            lines = [parent.stdout.readline() for _ in range(2)]
        finally:
            parent.kill()
        parent.communicate(timeout=20)  # returns when the last process that could write has ended
    assert lines == [b"hanging\n"] * 2
