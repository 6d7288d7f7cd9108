"""check_streams: races between streams are found, and the engine has none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from _support.tools.dryrun.mutants import Mutant, mutants
from _support.tools.dryrun.stream_programs import (
    CASES,
    Program,
    random_program,
    small_config,
    train,
)
from llama import Llama
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import parallel3d as p3d
from parallel3d._util.dry_run import HOST_DEVICE
from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun import record
from parallel3d.tools.dryrun.result import DryRun, Race, from_json, to_json

QUICK = ("HSDP",)


def checked(fn: Callable[[], object], world_size: int = 4) -> DryRun:
    return record(fn, world_size, 0, check_streams=True)


def in_group(program: Callable[[], object]) -> tuple[Race, ...]:
    """The races of a program on two ranks that have a group."""

    def run() -> None:
        dist.init_process_group()
        program()

    return checked(run, 2).races or ()


def races_of(program: Program) -> tuple[Race, ...]:
    found = checked(lambda: train(program), program.world_size).races
    assert found is not None
    return found


def told(found: tuple[Race, ...]) -> str:
    return "\n".join(map(str, found))


# ---- the engine ----


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]
)
def test_the_engine_is_clean(name: str) -> None:
    """No race. Without offload or an error no value is read and no stream waited for by the host, and a step
    allocates as often as the one before."""
    program = CASES[name]
    run = checked(lambda: train(program), program.world_size)
    assert run.races == (), told(run.races or ())
    if program.offload or program.raises:
        return
    counts = run.step_counts[: program.steps]
    assert [(each.reads, each.host_waits) for each in counts] == [(0, 0)] * program.steps
    second, third = (each.allocations for each in counts[1:3])
    assert third <= second


REFUSED = "collectives of the user's", "extensions"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK))
        for n in CASES
        if n not in REFUSED
    ],
)
def test_static_memory_is_clean(name: str) -> None:
    """Buffers that several units use in turn, and as few waits of the host as without."""
    program = CASES[name]
    before, found = (
        checked(lambda s=s: train(replace(program, static=s)), program.world_size)
        for s in (False, True)
    )
    assert found.races == (), told(found.races or ())
    for one, other in zip(found.step_counts[1:3], before.step_counts[1:3], strict=True):
        assert one.host_waits == other.host_waits
        assert one.allocations < other.allocations


SHOWN_BY = {
    "_InFlight.__init__": "HSDP",
    "stream.wait_event(self.post_optim_event)": "optimizer's event",
    "stream.wait_stream(self.fetch)": "offload, HSDP",
    "issue_gather: work.wait()": "collectives of the user's",
    "AllReduce.finish: work.wait()": "collectives of the user's",
    "ScatterWork.wait: work.wait()": "collectives of the user's",
    "bucket.gathering = event, inputs": "offload, prefetch lists",
    "_On.__exit__": "a reduction that raises",
    "StreamComm.run_over_replicate": "HFSDP",
    "flight.held.append(job.tensor)": "offload, HSDP",
    "flight.done.synchronize()": "offload, HSDP",
    "StreamComm.settle_host": "offload, evaluated",
    "hfsdp": "HFSDP",
    "sum_over_tp": "tp with sequence parallel",
    "_Moved.__del__": "activations offloaded, a backward that raises",
    "activations.offload": "activations offloaded",
    "Rotation": "cp, ring",
}
"""Part of a mutant's text -> the program that shows it; ``HSDP`` for the others."""

NOT_SHOWN = {
    "wait_event(bucket.gathering[0])": "no program reaches it: the engine ends the gathers of a forward "
    "that has raised before it issues others",
    "StreamComm.abandon": "what an exception keeps out of the lists is waited for where it was raised, but "
    "for a KeyboardInterrupt between two lines",
    "sum_over_tp: work.wait()": "the engine's own collectives have a work on the CPU only",
    "WiredSum.wait: work.wait()": "the engine's own collectives have a work on the CPU only",
    "_check_agreement": "the sizes that ranks compare are integers, which a dry run does not follow",
}
"""Part of a mutant's text -> why no program can show it."""


def name_of(mutant: Mutant) -> str:
    return next((case for part, case in SHOWN_BY.items() if part in str(mutant)), "HSDP")


def is_shown(mutant: Mutant) -> bool:
    return not any(part in str(mutant) for part in NOT_SHOWN)


FOUND = [mutant for mutant in mutants() if is_shown(mutant)]


def test_every_wait_is_listed() -> None:
    """30 lines: those that are found, and five that can't be."""
    assert len(mutants()) == len(FOUND) + len(NOT_SHOWN) >= 30


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=pytest.mark.slow, id=str(m)) for m in FOUND],
)
def test_what_is_taken_out_is_found(mutant: Mutant) -> None:
    """A wait of a stream, or a reference that keeps memory while a stream uses it."""
    with mutant.in_place():
        assert races_of(CASES[name_of(mutant)])


KEPT_ANYWAY = "_InFlight.__init__", "bucket.gathering = event, inputs"
"""What keeps a tensor alive that static memory keeps for ever; it is found where that is another's."""
OF_SLOTS = "issue_gather: stream.wait_stream(compute)", "_wait_once: compute.wait_event(event)"


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            m, id=str(m), marks=[pytest.mark.slow] * all(s not in str(m) for s in OF_SLOTS)
        )
        for m in FOUND
        if name_of(m) not in REFUSED
    ],
)
def test_what_is_taken_out_is_found_with_static_memory(mutant: Mutant) -> None:
    """An all-gather into a slot that is still read, a gradient in memory that a reduction reads, ..."""
    with mutant.in_place():
        found = races_of(replace(CASES[name_of(mutant)], static=True))
    assert bool(found) is not any(part in str(mutant) for part in KEPT_ANYWAY), told(found)
    if any(part in str(mutant) for part in OF_SLOTS):
        kinds = {race.memory for race in found if race.kind == "no wait between"}
        assert kinds & {"unsharded parameters", "communication"}, told(found)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1000, 1002), marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 25), marks=pytest.mark.full) for n in range(0, 300, 25)),
    ],
    ids=str,
)
def test_random_programs_are_clean(seeds: range) -> None:
    """300 in all, every third with static memory."""
    for seed in seeds:
        program = replace(random_program(seed), static=seed % 3 == 0)
        found = races_of(program)
        assert not found, f"seed {seed}: {program}\n{told(found)}"


# ---- torch's own ----


def torchs_hsdp() -> None:
    """FSDP2 under HSDP with CPU offload."""
    mesh = p3d.build_mesh(p3d.MeshLayout(2, 2, 1), device_type="cpu")["replicate", "shard"]
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_torchs_race_of_hsdp_with_offload(monkeypatch) -> None:
    """pytorch PR 180665: a reduce-scatter writes what is still copied to the CPU, on another stream.

    torch 2.13 keeps each result of a reduce-scatter until the backward's end, which PR 140044 has added for
    the all-reduce; without that the memory is free when ``foreach_reduce`` returns.
    """
    assert checked(torchs_hsdp).races == ()
    monkeypatch.setattr(_fsdp_param_group, "AllReduceState", lambda tensor, event: None)
    races = checked(torchs_hsdp).races
    assert races
    (copy,) = [race for race in races if race.first.name == "_to_copy"]
    assert copy.kind == "memory used again" and copy.freed
    assert (copy.first.stream, copy.first.does) == ("all_reduce_stream", "reads")
    assert (copy.second.name, copy.second.stream) == ("reduce_scatter", "reduce_scatter_stream")
    assert "foreach_reduce" in copy.first.line
    assert "all_reduce_stream" in copy.missing and "keep the memory" in copy.missing


# ---- a user's own streams ----


def on_a_side_stream(*, before: bool, after: bool, freed: str = "") -> None:
    side = torch.cuda.Stream()
    x = torch.randn(8)
    if before:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if freed == "recorded":
        x.record_stream(side)
    if freed:
        del x
        torch.randn(8)
    if after:
        torch.cuda.current_stream().wait_event(side.record_event())
    y.add_(1)


def found_in(**how: object) -> tuple[Race, ...]:
    found = checked(lambda: on_a_side_stream(**how), 1).races  # type: ignore[arg-type]
    assert found is not None
    return found


def test_both_operations_and_the_wait_are_named() -> None:
    assert not found_in(before=True, after=True)
    (first,) = found_in(before=False, after=True)
    assert str(first.first).startswith("randn writes it on stream 'compute'")
    assert str(first.second).startswith("mul reads it on stream 'side'")
    assert "in on_a_side_stream" in first.second.line and __file__ in first.second.line
    assert first.missing == "let 'side' wait for an event recorded on 'compute' after randn"
    (last,) = found_in(before=True, after=False)
    assert (last.first.name, last.second.name) == ("mul", "add_")
    assert "missing: let 'compute' wait" in str(last)


def test_freed_memory_is_used_again_by_its_own_stream() -> None:
    (race,) = found_in(before=True, after=True, freed="at once")
    assert race.kind == "memory used again" and "in on_a_side_stream" in race.freed
    assert (race.first.name, race.second.name) == ("mul", "randn")
    assert not found_in(before=True, after=True, freed="recorded")


def test_a_read_waits_for_the_stream_alone() -> None:
    def program(late: bool) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = torch.randn(1)
            if not late:
                y.item()
        if late:
            y.item()
        y.add_(1)

    assert not checked(lambda: program(late=False), 1).races
    found = checked(lambda: program(late=True), 1).races or ()
    (race,) = [race for race in found if race.second.name == "item"]
    assert (race.first.stream, race.second.stream) == ("side", "compute")


def test_a_copy_to_the_host_waits_unless_it_says_that_it_does_not() -> None:
    def program(non_blocking: bool) -> None:
        x = torch.randn(8)
        x.to(HOST_DEVICE, non_blocking=non_blocking).add_(1)  # by the host
        torch.empty(8, device=HOST_DEVICE).copy_(x, non_blocking=non_blocking).add_(1)

    assert not checked(lambda: program(False), 1).races
    races = checked(lambda: program(True), 1).races or ()
    assert [race.second.stream for race in races] == ["host", "host"]
    assert races[0].missing == "synchronize() of an event recorded on 'compute' after _to_copy"


def test_events_and_synchronisation() -> None:
    def program(how: str) -> None:
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with side:
            y = torch.randn(8)
            event.record()
        if how == "event":
            event.wait()
        elif how == "all":
            torch.cuda.synchronize()
        elif how == "host":
            event.synchronize()
        y.add_(1)

    assert not any(
        checked(lambda how=how: program(how), 1).races for how in ("event", "all", "host")
    )
    assert checked(lambda: program("none"), 1).races


def waited_for_twice() -> None:
    side, x = torch.cuda.Stream(), torch.randn(8)
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        x * 2
    work.synchronize()
    x * 3


def entered_twice() -> None:
    side = torch.cuda.Stream()
    with side, side:
        pass
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def asked_for_its_end() -> None:
    side = torch.cuda.Stream()
    with side:
        x = torch.randn(8)
        event = side.record_event()
    while not event.query():
        pass
    x.add_(1)
    with side:
        y = torch.randn(8)
    while not side.query():
        pass
    y.add_(1)


def of_a_device_module() -> None:
    module = torch.get_device_module("cpu")
    side = module.Stream()
    with module.stream(side):
        x = torch.randn(8)
    module.synchronize()
    x.add_(1)


def of_any_accelerator() -> None:
    side, event = torch.Stream(), torch.Event()
    assert isinstance(side, torch.Stream) and isinstance(side, torch.cuda.Stream)
    with side:
        x = torch.randn(8)
        event.record()
    torch.accelerator.current_stream().wait_event(event)
    x.add_(1)


def in_annotations() -> None:
    def wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None = None) -> None:
        assert isinstance(stream, torch.cuda.Stream) and not isinstance(event, torch.cuda.Event)

    exec("import torch\ndef wait(stream: torch.cuda.Stream | None): pass", {})
    wait(torch.cuda.Stream())


def read_while_sent() -> None:
    x = torch.randn(8)
    works = [dist.isend(x, 1), dist.broadcast(x, 0, async_op=True)]
    works.append(dist.reduce(x, 1, async_op=True))
    x * 2
    for work in works:
        work.wait()


def waited_for_by_a_view_of_it() -> None:
    total = torch.ops._c10d_functional.all_reduce(torch.randn(8), "sum", "0")
    torch.ops._c10d_functional.wait_tensor(total.view(2, 4))
    total + 1


def read_while_split() -> None:
    split_on_a_side_stream(lambda whole, parts: whole.sum())


def split_on_a_side_stream(then: Callable[[torch.Tensor, list[torch.Tensor]], object]) -> None:
    side, whole, parts = torch.cuda.Stream(), torch.randn(8), [torch.empty(4), torch.empty(4)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.split_with_sizes_copy(whole, [4, 4], out=parts)
    then(whole, parts)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize(
    "program",
    [
        waited_for_twice,
        entered_twice,
        asked_for_its_end,
        of_a_device_module,
        of_any_accelerator,
        in_annotations,
        read_while_sent,
        read_while_split,
        waited_for_by_a_view_of_it,
    ],
)
def test_what_is_in_order_is_clean(program: Callable[[], None]) -> None:
    found = in_group(program)
    assert not found, told(found)


def written_while_sent() -> None:
    x = torch.randn(8)
    work = dist.isend(x, 1)
    x.add_(1)
    work.wait()


def not_received() -> None:
    x = torch.empty(8)
    work = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0]
    x.add_(1)
    work.wait()


def not_waited_for() -> None:
    total = torch.ops._c10d_functional.all_reduce(torch.randn(8), "sum", "0")
    total + 1


def read_before_split() -> None:
    split_on_a_side_stream(lambda whole, parts: parts[1].sum())


@pytest.mark.parametrize(
    ("program", "pair"),
    [
        (written_while_sent, ("send", "add_")),
        (not_received, ("recv", "add_")),
        (not_waited_for, ("all_reduce", "add")),
        (read_before_split, ("split_with_sizes_copy", "sum")),
    ],
)
def test_what_is_not_in_order_is_found(program: Callable[[], None], pair: tuple[str, str]) -> None:
    (race,) = in_group(program)
    assert (race.first.name, race.second.name) == pair


def test_torchs_copy_before_an_all_gather_reads_the_weights() -> None:
    """The optimizer's event is recorded before its step."""

    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(1, 2, 1), device_type="cpu")["shard"]
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            event = torch.cuda.current_stream().record_event()
            optimizer.step()
            model.set_post_optim_event(event)
            optimizer.zero_grad()

    races = checked(program, 2).races or ()
    assert ("add_", "all_gather_copy_in") in {(r.first.name, r.second.name) for r in races}


def test_lines_of_a_module_whose_name_begins_as_torchs() -> None:
    source = inspect.getsource(on_a_side_stream)
    names = {"torch": torch, "__name__": "torchtitan.train"}
    exec(compile("from __future__ import annotations\n" + source, "train.py", "exec"), names)
    (race,) = checked(lambda: names["on_a_side_stream"](before=False, after=True), 1).races or ()
    assert race.first.line.startswith("train.py:") and race.second.line.startswith("train.py:")


def test_memory_may_be_recorded_without_a_check() -> None:
    record(lambda: on_a_side_stream(before=True, after=True, freed="recorded"), 1)


# ---- what is returned ----


def test_written_as_json() -> None:
    run = checked(lambda: on_a_side_stream(before=False, after=False), 1)
    assert run.races and from_json(to_json(run)) == run
    assert record(lambda: None, 1).races is record(lambda: None, 1).obstacles is None


@pytest.mark.parametrize("check", ["check_streams", "check_capture"])
def test_gloo_has_no_streams(check: str) -> None:
    with pytest.raises(DryRunError, match=f"{check} with backend='gloo': there are no streams"):
        record(lambda: None, 1, backend="gloo", **{check: True})


@pytest.mark.slow
def test_collectives_and_memory_are_the_same_with_it() -> None:
    program = CASES["HSDP"]
    plain = record(lambda: train(program), 4)
    run = checked(lambda: train(program))
    assert (run.collectives, run.memory, run.peak) == (plain.collectives, plain.memory, plain.peak)


# ---- what keeps the host from running ahead ----


def plain_training() -> None:
    """Three steps of the same Llama, clipped."""
    model, ids = Llama(small_config()), torch.arange(2 * 17).view(2, 17) % 128
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(ids).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_step_allocates_no_more_often_than_the_plain_models() -> None:
    plain = record(plain_training, 1).step_counts
    ours = record(lambda: train(CASES["FSDP, one dtype"]), 4).step_counts
    assert plain[2].reads == plain[2].host_waits == 0
    assert ours[2].allocations <= plain[2].allocations


@pytest.mark.slow
def test_with_offload_the_host_waits_once_a_unit() -> None:
    """For the copies of the gradients, and once for those of the shards: four units and the root."""
    counts = record(lambda: train(CASES["offload"]), 4).step_counts
    assert [each.host_waits for each in counts] == [5, 5, 5, 0]


def test_reads_and_waits_are_counted() -> None:
    def program() -> None:
        layer = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(2):
            loss = layer(torch.randn(1, 2)).sum()
            loss.backward()
            print(f"{loss.item():.3f}")
            torch.cuda.synchronize()
            optimizer.step()

    counts = record(program, 1).step_counts
    assert [(each.reads, each.host_waits) for each in counts] == [(1, 1), (1, 1), (0, 0)]
