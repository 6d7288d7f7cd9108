"""guards.watch under NCCL: kernels that wait for a failed rank are ended, and what they leave is not used."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.guards.stand_ins import (
    FAILED,
    GRACE,
    NAMES_IT,
    Gloo,
    Group,
    Nccl,
    failing_job,
    job,
    monitor_of_watch,
    until,
)
from torch import nn

import parallel3d as p3d
from parallel3d import PeerFailureError, StateError, checkpoint, guards
from parallel3d.guards import session
from parallel3d.guards.board import Note
from parallel3d.guards.timeouts import here

SECONDS = GRACE.total_seconds()
NOT_MADE = "This optimizer step was not made"
LOAD = "load the last checkpoint"


def an_optimizer() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.arange(6.0))
    weight.grad = torch.full((6,), float("nan"))  # what an aborted collective has left
    return weight, torch.optim.AdamW([weight], lr=0.1)


# -- What is aborted, and when -------------------------------------------------------------------------


def test_each_communicator_is_aborted_once() -> None:
    one, two, gloo = Nccl(), Nccl(), Gloo()
    groups = [Group(cpu=gloo, cuda=one), Group(cuda=two), Group(cuda=one), Group(cpu=Gloo())]
    with failing_job(*groups) as (ranks, _):
        ranks.rank_1_fails(one, two)
        ranks.rank_1_posts(FAILED, Note("lost", 1))
        time.sleep(2 * SECONDS)
        assert monitor_of_watch().aborted is not None
    assert (one.aborts, two.aborts, gloo.aborts, gloo.woken) == (1, 1, 0, 1)


@pytest.mark.parametrize("notes", [[], [Note("left", 1)], [Note("lost", 0)], [Note("roll", 1)]])
def test_nothing_is_aborted_without_a_failure(notes: list[Note]) -> None:
    backend = Nccl()
    weight, optimizer = an_optimizer()
    weight.grad = torch.ones(6)
    with job(Group(cuda=backend)) as ranks:
        with ranks.watch() as watching:
            ranks.rank_1_posts(*notes) if notes else None
            time.sleep(2 * SECONDS)
            optimizer.step()
            assert watching.aborted is None
        ranks.rank_1_posts()
        time.sleep(2 * SECONDS)  # the thread is gone
    assert backend.aborts == 0 and weight.detach()[1] != 1


def test_a_rank_that_is_lost_or_silent() -> None:
    """It has posted no error; the rank that noticed has."""
    backend = Nccl()
    what = "rank 1 is lost: killed or hung; it posted no error"
    with failing_job(Group(cuda=backend), match=what) as (_, caught):
        monitor_of_watch()._seen = time.monotonic()  # as ``_beat`` does for the next rank
        backend.synchronize()
    assert caught.value.ranks == (1,) and LOAD in str(caught.value)


def test_groups_without_nccl_have_no_abort() -> None:
    gloo = Gloo()
    with job(Group(cpu=gloo)) as ranks, ranks.watch() as watching:
        ranks.rank_1_posts()
        assert until(lambda: gloo.woken)
        time.sleep(SECONDS / 2)
        assert watching.aborted is None and gloo.aborts == 0


def test_a_group_that_is_destroyed_meanwhile_spares_none_of_the_others() -> None:
    class Destroyed(Group):
        @property
        def _device_types(self) -> list[torch.device]:
            raise ValueError("Invalid process group specified or has been destroyed.")

        @_device_types.setter
        def _device_types(self, value: object) -> None: ...

    backend = Nccl()
    with failing_job(Destroyed(cuda=Nccl()), Group(cuda=backend)) as (ranks, _):
        ranks.rank_1_fails(backend)
    assert backend.aborts == 1


def test_the_backend_inside_one_that_checks_arguments() -> None:
    inner, checking = Nccl(), Nccl()
    checking.wrapped_pg = inner  # type: ignore[attr-defined]
    with failing_job(Group(cuda=checking)) as (ranks, _):
        ranks.rank_1_fails(inner)
    assert (inner.aborts, checking.aborts) == (1, 0)


def test_all_at_once() -> None:
    """An abort may wait for the device, and so for the kernels of the other communicators."""
    both = threading.Barrier(2, timeout=2)
    one, two = (Nccl(lambda: both.wait() and None) for _ in range(2))
    what = "2 NCCL communicators aborted, at step 1"
    with failing_job(Group(cuda=one), Group(cuda=two), match=what) as (ranks, _):
        ranks.rank_1_fails(one, two)


def test_it_is_known_and_its_cause_printed_before_the_first_kernel_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The main thread may go on at once; NCCL's watchdog may end the process, or the abort hang."""
    known: list[object] = []
    backend = Nccl(lambda: known.extend([watching[0].aborted is not None, capfd.readouterr().err]))
    watching: list[Any] = []
    with failing_job(Group(cuda=backend)) as (ranks, _):
        watching.append(monitor_of_watch())
        ranks.rank_1_fails(backend)
    assert known[0] is True
    assert re.search("guards.watch on rank 0 aborts 1 .*: " + NAMES_IT, str(known[1]))


# -- What is refused afterwards ------------------------------------------------------------------------


def test_no_optimizer_step_is_made() -> None:
    backend = Nccl()
    weight, optimizer = an_optimizer()
    before = weight.detach().clone()
    with failing_job(Group(cuda=backend)) as (ranks, caught):
        ranks.rank_1_fails(backend)
        optimizer.step()
    assert torch.equal(weight.detach(), before) and not optimizer.state
    text = str(caught.value)
    assert NOT_MADE in text and LOAD in text and caught.value.ranks == (1,)
    assert "Rank 0: 1 NCCL communicator aborted, at step 1, phase start" in text


class Slow(torch.optim.SGD):
    """The host is in its step while rank 1 fails."""

    meanwhile: Any = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.meanwhile()
        return result


def test_a_step_that_was_under_way() -> None:
    """Its kernels may have read what the aborted ones have left: the error says so."""
    backend = Nccl()
    weight, _ = an_optimizer()
    optimizer = Slow([weight], lr=0.1)
    with failing_job(Group(cuda=backend)) as (ranks, caught):
        optimizer.meanwhile = lambda: ranks.rank_1_fails(backend)
        optimizer.step()
        pytest.fail("the step went through")
    text = str(caught.value)
    assert "An optimizer step was made meanwhile" in text and LOAD in text
    assert "the weights may hold values of an aborted collective" in text and NOT_MADE not in text


def a_model() -> nn.Module:
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    return p3d.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)


@pytest.mark.parametrize("grad", [True, False])
def test_no_forward_is_begun(grad: bool) -> None:
    backend = Nccl()
    with failing_job(Group(cuda=backend)) as (ranks, caught), torch.set_grad_enabled(grad):
        model = a_model()
        model(torch.ones(2, 4))
        ranks.rank_1_fails(backend)
        model(torch.ones(2, 4))
    assert "This forward was not begun" in str(caught.value)


SAVES: dict[str, Any] = {
    "save": lambda path, model: checkpoint.save(path, model, step=1),
    "save_dcp": lambda path, model: checkpoint.save_dcp(path / "dcp", model),
    "save_torch": lambda path, model: checkpoint.save_torch(path / "file.pt", model),
}


@pytest.mark.parametrize("call", list(SAVES))
def test_no_save_is_begun(call: str, tmp_path: Path) -> None:
    backend = Nccl()
    with failing_job(Group(cuda=backend)) as (ranks, caught):
        model = a_model()
        ranks.rank_1_fails(backend)
        SAVES[call](tmp_path, model)
    assert f"checkpoint.{call} was not begun" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_save_that_was_under_way_is_finished() -> None:
    """It copies values when the kernels have ended."""
    from parallel3d.checkpoint.ranks import Ranks

    backend = Nccl()
    saving = Ranks(None, 0, 1, (0,), "save")
    with failing_job(Group(cuda=backend), match="save was not finished") as (ranks, _):
        saving.all(lambda: ranks.rank_1_fails(backend))
        saving.first(lambda: pytest.fail("committed"))
    with failing_job(Group(cuda=backend), match="save was not finished") as (ranks, _):
        ranks.rank_1_fails()
        assert until(lambda: backend.aborts == 2)
        saving.all(lambda: pytest.fail("written"))


# -- The end of the watch ------------------------------------------------------------------------------

ENDED = "The watched part ended after it"


def test_a_watch_that_ends_after_it() -> None:
    backend = Nccl()
    with failing_job(Group(cuda=backend), match=ENDED) as (ranks, caught):
        ranks.rank_1_fails(backend)
    assert re.search(NAMES_IT, str(caught.value))
    kinds = [note.kind for note in ranks.board().read() if note.rank == 0]
    assert "left" not in kinds and "failed" not in kinds and kinds[-1] == "end"


def test_an_error_that_comes_of_it_is_not_this_rank_s_own() -> None:
    backend = Nccl()
    with failing_job(Group(cuda=backend)) as (ranks, caught):
        ranks.rank_1_fails(backend)
        raise StateError("the loss is nan")
    assert isinstance(caught.value.__cause__, StateError)
    assert not [n for n in ranks.board().read() if n.rank == 0 and n.kind == "failed"]


def test_ctrl_c_stays_what_it_is() -> None:
    backend = Nccl()
    with job(Group(cuda=backend)) as ranks, pytest.raises(KeyboardInterrupt), ranks.watch():
        ranks.rank_1_fails(backend)
        raise KeyboardInterrupt


def test_who_swallows_the_error_is_told_again() -> None:
    backend = Nccl()
    weight, optimizer = an_optimizer()
    before = weight.detach().clone()
    with failing_job(Group(cuda=backend), match=ENDED) as (ranks, _):
        ranks.rank_1_fails(backend)
        for _ in range(3):
            with pytest.raises(PeerFailureError, match=NOT_MADE):
                optimizer.step()
    assert torch.equal(weight.detach(), before)


def test_the_next_watch_begins_anew() -> None:
    backend = Nccl()
    weight, optimizer = an_optimizer()
    with job(Group(cuda=backend)) as ranks:
        with pytest.raises(PeerFailureError), ranks.watch():
            ranks.rank_1_fails(backend)
        with ranks.watch() as watching:
            optimizer.step()
            assert watching.aborted is None
        with pytest.raises(PeerFailureError, match=NAMES_IT), ranks.watch():
            ranks.rank_1_fails()
            assert until(lambda: backend.aborts == 2)  # torch's does nothing the second time
    optimizer.step()  # no hook is left
    assert here.step == 0 or session.current_session() is None
    assert weight.isnan().all()


def test_an_abort_that_hangs_holds_up_no_exit() -> None:
    let_go = threading.Event()
    hanging, other = Nccl(lambda: let_go.wait(20) and None), Nccl()
    start = time.monotonic()
    with failing_job(Group(cuda=hanging), Group(cuda=other)) as (ranks, caught):
        ranks.rank_1_fails(other)  # the hanging one holds up nobody else's
    assert time.monotonic() - start < 8 * SECONDS
    let_go.set()
    assert "2 NCCL communicators aborted" in str(caught.value)
    assert "1 not ended yet" in str(caught.value)


def test_the_end_waits_for_an_abort_a_while() -> None:
    """Otherwise groups would be destroyed while they are aborted."""
    backend = Nccl(lambda: time.sleep(SECONDS / 2))
    with failing_job(Group(cuda=backend)) as (ranks, _):
        watching = monitor_of_watch()
        ranks.rank_1_posts(FAILED, Note("end", 1))  # this rank need not wait for it
        assert until(lambda: backend.aborts)
    assert watching.aborted is not None
    assert backend.ended.is_set() and watching.aborted.wait(0)


def test_an_abort_that_raises() -> None:
    def fails() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    failing, other = Nccl(fails), Nccl()
    with failing_job(Group(cuda=failing), Group(cuda=other)) as (ranks, caught):
        ranks.rank_1_fails(other)
        assert until(lambda: failing.aborts)
    assert "1 raised RuntimeError: NCCL error: unhandled system error" in str(caught.value)


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can abort nothing then, but goes on with nothing either."""
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "parallel3d-guards-abort":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    backend = Nccl()
    with failing_job(Group(cuda=backend), match="can't start new thread") as (ranks, _):
        ranks.rank_1_posts()
        assert until(lambda: monitor_of_watch().aborted is not None)
    assert backend.aborts == 0


# -- Between processes ---------------------------------------------------------------------------------


def waits_for_the_device() -> tuple[str, bool]:
    """Rank 1 fails; rank 0's kernels, of which gloo has none, wait for it, and its optimizer's for them."""
    from _support.guards.stand_ins import Group, Nccl
    from torch import distributed as dist

    backend = Nccl()
    own = session.all_groups
    weight, optimizer = an_optimizer()
    before = weight.detach().clone()
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "all_groups", lambda: [*own(), Group(cuda=backend)])
        try:
            with guards.watch(grace=2 * GRACE):
                dist.barrier()
                if dist.get_rank() == 1:
                    raise LookupError("no more samples")
                backend.synchronize()
                optimizer.step()
        except (PeerFailureError, LookupError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, torch.equal(weight.detach(), before)


def test_on_ranks(gloo_pool) -> None:
    (waited, kept), (failed, _) = gloo_pool.run(waits_for_the_device, world_size=2, timeout=40)
    assert waited.startswith("PeerFailureError: rank 1 failed first, at step 1, ")
    assert "LookupError: no more samples" in waited and NOT_MADE in waited and kept
    assert failed == "LookupError: no more samples"
