"""Debug mode where nothing is wrong; journals; diagnose; gradients that a tp group has whole."""

import json
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from _support.guards import jobs
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d import AgreementError, MeshLayout, Parallel3dError, build_mesh, guards
from parallel3d.guards.debugging import Debugger
from parallel3d.guards.journal import Journal, RankEvent, first_difference
from parallel3d.testing import fake_world, local_world


def trained(debug: bool, sizes: tuple[int, int, int], **options) -> list[torch.Tensor]:
    """Weights after two steps of two micro-batches, with collectives of the user's own between."""
    torch.manual_seed(0)
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    model = p3d.parallelize(Lm(), mesh, LM_PLAN, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        for step in range(2):
            for micro in range(2):
                lm_loss(model, tokens(step + micro + dist.get_rank() // sizes[2])).backward()
            p3d.optim.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() < 2:  # of two ranks only, who go on together
                numbers = torch.zeros(2)
                dist.send(numbers, 1) if dist.get_rank() == 0 else dist.recv(numbers, 0)
            counts = [1, 3, 1, 3]
            gathered = torch.empty(4 * counts[dist.get_rank()])
            # Uneven.
            dist.all_to_all_single(gathered, torch.ones(8), [counts[dist.get_rank()]] * 4, counts)
            dist.barrier()

    if debug:
        with guards.debug(model):
            run()
        dist.barrier()  # all have left
        assert p3d.diagnose().divergence == ""
    else:
        run()
    return [param.to_local() for param in model.parameters()]


def undisturbed(*args, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip(trained(False, *args, **options), trained(True, *args, **options), strict=True)
    assert all(torch.equal(plain, debugged) for plain, debugged in pairs)


def recomputing() -> None:
    undisturbed((1, 2, 2), activation_checkpointing=True)


def keeping() -> None:
    undisturbed((2, 2, 1), reshard_after_forward=False)


@pytest.mark.parametrize("job", [recomputing, pytest.param(keeping, marks=pytest.mark.slow)])
def test_a_job_that_is_right_runs_as_ever(gloo_pool, job) -> None:
    gloo_pool.run(job, world_size=4)


def two_stages() -> int:
    """Each half of the world with a model and a number of collectives of its own."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    stage = mesh.get_local_rank("pp")
    model = p3d.parallelize(torch.nn.Linear(3, 4), mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guards.debug(model) as debugger:
        for _ in range(2):
            for _ in range(1 + stage):
                model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    return debugger.journal.events[-1].number


def test_pipeline_stages_are_compared_apart(gloo_pool) -> None:
    first, same, other, last = gloo_pool.run(two_stages, world_size=4)
    assert first == same < other == last


def told_from_the_store() -> tuple[str, str]:
    with pytest.raises(AgreementError):
        jobs.fewer_micro_batches()
    found = guards.diagnose()
    return found.divergence, str(found)


@pytest.mark.slow
def test_diagnosis_from_the_store(gloo_pool) -> None:
    for divergence, report in gloo_pool.run(told_from_the_store, world_size=4):
        assert divergence.startswith("rank 2 differs from the majority, about to issue:")
        assert "rank 2: optimizer step (SGD) (step 3, micro-batch 1)" in divergence
        assert "ranks 0-1, 3: all_gather on shard for unit Branching" in divergence
        assert "rank 3, last:\n" in report


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_diagnosis_from_files_after_a_kill(tmp_path: Path) -> None:
    from _support.launch import launch

    found = launch(jobs.ending, jobs.killed_in_debug, str(tmp_path), ranks=4, timeout=60, dying=[2])
    for rank, (ending, _) in enumerate(found):
        if rank != 2:
            assert ending.error == "AgreementError" and ending.seconds < jobs.LIMIT, ending
            assert (
                "rank 2 did not reach the collective at which others wait within 4 s"
                in ending.message
            )
            assert "rank 2: optimizer step (SGD) (step 2, micro-batch 2)" in ending.message
    report = p3d.diagnose(tmp_path)
    assert "rank 2 stopped first" in report.divergence
    assert set(report.failures) == {0, 1, 3}
    assert "rank 2 neither left debug mode nor ended with an error" in str(report)


def test_by_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PARALLEL3D_DEBUG", "1")
    monkeypatch.setenv("PARALLEL3D_DEBUG_DIR", str(tmp_path))
    with fake_world(1, 4):
        mesh = build_mesh(MeshLayout(shard=4), device_type="cpu")
        model = p3d.parallelize(Lm(), mesh)
        with guards.watch():
            lm_loss(model, tokens(0)).backward()
    (events,) = p3d.diagnose(tmp_path).events.values()
    assert events[0].what == "all_gather"
    assert events[-1].what == "left debug mode"
    assert [event.number for event in events] == list(range(1, len(events) + 1))


def test_simulated_ranks_compare_nothing() -> None:
    with local_world(4):
        mesh = build_mesh(MeshLayout(shard=4), device_type="cpu")
        model = p3d.parallelize(Lm(), mesh)
        with guards.debug(model) as debugger:
            lm_loss(model, tokens(0)).backward()
        assert not debugger.journal.is_shared and len(debugger.journal.events) > 4


def test_arguments(tmp_path: Path) -> None:
    for options, text in (
        ({"timeout": 3}, "timeout is 3"),
        ({"keep": 0}, "keep is 0"),
        ({"model": 3}, "model is 3"),
    ):
        with pytest.raises(Parallel3dError, match=text), guards.debug(**options):
            pass
    with pytest.raises(Parallel3dError, match="has no journal"):
        p3d.diagnose(tmp_path)


class TestEvents:
    def log(self, *whats: str) -> list[RankEvent]:
        return [RankEvent(number, what, ranks=(0, 1)) for number, what in enumerate(whats, 1)]

    def test_a_line_that_was_cut_short_is_left_out(self, tmp_path: Path) -> None:
        journal = Journal(0, 10, tmp_path)
        for event in self.log("a", "b"):
            journal.note(event)
        journal.close()
        path = tmp_path / "rank0.jsonl"
        path.write_text(path.read_text() + '{"number": 3, "wha')
        (tmp_path / "rank0.txt").write_text("no journal")
        (tmp_path / "rankx.jsonl").write_text("[]\n")
        assert dict(p3d.diagnose(tmp_path).events) == {0: self.log("a", "b")}

    def test_first_difference(self) -> None:
        same, other = self.log("a", "b", "c"), self.log("a", "x", "c")
        assert first_difference({0: same, 1: same}) == ("", [])
        said, odd = first_difference({0: same, 1: other, 2: same})
        assert odd == [1] and "\n  rank 1: x (" in said and "\n  ranks 0, 2: b (" in said

    def with_messages(self, tmp_path: Path, rank: int, *whats: str) -> None:
        """Writes what debug mode does for such a sequence; sends and receives between two ranks."""
        debugger = Debugger([], timedelta(1), None, 10)
        debugger.journal = Journal(rank, 10, tmp_path)
        for what in whats:
            ranks = () if what in ("send", "recv") else (0, 1)
            debugger._meet(what, "shard", ranks)
        debugger.end("")

    def test_sends_and_receives_are_not_compared(self, tmp_path: Path) -> None:
        self.with_messages(tmp_path, 0, "a", "send", "send", "recv", "b", "c")
        self.with_messages(tmp_path, 1, "recv", "a", "b", "send", "c", "recv")
        found = p3d.diagnose(tmp_path)
        assert found.divergence == ""
        assert [event.what for event in found.events[1]][:2] == ["recv", "a"]  # kept

    def test_messages_do_not_hide_what_comes_later(self, tmp_path: Path) -> None:
        self.with_messages(tmp_path, 0, "a", *["send"] * 20, "b", "c", "d")
        self.with_messages(tmp_path, 1, "a", "recv", "b", "x", "d")
        divergence = p3d.diagnose(tmp_path).divergence
        assert divergence.startswith("no majority does the same, about to issue:")
        assert "rank 0: c on shard" in divergence and "rank 1: x on shard" in divergence

    def test_who_stopped_first_is_told_without_counting_messages(self, tmp_path: Path) -> None:
        self.with_messages(tmp_path, 0, "a", "b", *["send"] * 20)
        self.with_messages(tmp_path, 1, "a", "b", "c")
        assert p3d.diagnose(tmp_path).divergence.startswith("rank 0 stopped first; ")

    def test_bytes_that_may_differ_do_not_count(self) -> None:
        one, two = RankEvent(1, "a", bytes=3), RankEvent(1, "a", bytes=4)
        assert not one.agrees_with(two)
        assert one.agrees_with(RankEvent(1, "a", bytes=None))
        assert RankEvent.from_json(json.dumps(asdict(one))) == one

    def test_a_long_file_begins_anew(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("parallel3d.guards.journal._MOST_BYTES", 300)
        journal = Journal(3, 10, tmp_path)
        events = self.log(*"abcdefgh")
        for event in events:
            journal.note(event)
        journal.close()
        assert list(p3d.diagnose(tmp_path, keep=2).events[3]) == events[-2:]


# Before the first step debug compares the gradients that each rank of a tp group has whole.

PLAN = {"attention.{q,k,v}": "colwise", "attention.o": "rowwise"}
SUMMED = {"attention.norm": "replicated_with_grad_allreduce"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.RMSNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.num_heads, -1)
        q, k, v = (p(x).view(heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.norm(q), k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Of which no input can be guessed, so that the plan is not checked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), Attention()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.attention(self.first(batch["x"])).square().mean()


def on_ranks(plan: dict) -> str:
    layout = MeshLayout(1, 2, 2)
    mesh = build_mesh(layout, device_type="cpu")
    torch.manual_seed(0)
    model = p3d.parallelize(Model(), mesh, plan, audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("shard")))
    said = ""
    with guards.debug(model):
        for _ in range(2):
            model({"x": x}).backward()
            try:
                optimizer.step()
            except AgreementError as error:
                said = str(error)
                break
            optimizer.zero_grad()
    return said


def test_a_norm_on_each_ranks_heads(gloo_pool) -> None:
    for said in gloo_pool.run(on_ranks, PLAN, world_size=4):
        assert "the gradient of attention.norm.weight" in said
        assert "and those of" not in said
        assert "replicated_with_grad_allreduce" in said


def test_with_its_style(gloo_pool) -> None:
    assert gloo_pool.run(on_ranks, {**PLAN, **SUMMED}, world_size=4) == [""] * 4


def test_other_rows_on_a_rank_of_the_group(gloo_pool) -> None:
    for said in gloo_pool.run(other_rows, world_size=2):
        assert "the gradient of first.weight" in said


def other_rows() -> str:
    mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
    torch.manual_seed(0)
    model = p3d.parallelize(Model(), mesh, {**PLAN, **SUMMED}, check_same_batch=False, audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(mesh.get_local_rank("tp"))
    with guards.debug(model), pytest.raises(AgreementError) as error:
        model({"x": torch.randn(2, 3, 8)}).backward()
        optimizer.step()
    return str(error.value)
