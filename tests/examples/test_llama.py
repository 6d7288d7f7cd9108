"""The parts of examples/llama: sizes, data, and what its runs say where files are not what they need."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llama import Llama, LlamaConfig
from options import Options, Size, UsageError, parse
from run import Run
from step_log import StepLog
from text import Samples, read_text, shuffled

import parallel3d as p3d
from parallel3d._util.dry_run import running
from parallel3d.testing import fake_world

# Parameters as Meta's checkpoints have them.
COUNTS = {
    "1b": 1_235_814_400,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


@pytest.mark.parametrize("size", COUNTS)
def test_parameters(size: str) -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig.named(size))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[size]
    tied = model.output.weight is model.tok_embeddings.weight
    assert tied == (size == "1b")


def test_positions_of_a_part_of_the_sequence() -> None:
    """Given as whole sequences have them, they change nothing; a part has its own."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig.named("nano"))
    tokens = torch.randint(0, 256, (2, 16))
    whole = torch.arange(16)[None]
    assert torch.equal(model(tokens, whole), model(tokens))
    rope, x = model.layers[0].attention.rope, torch.randn(2, 4, 16, 8)
    places = torch.tensor([[2, 3, 12, 13]])
    part = rope(x[:, :, places[0], : 2 * rope.cos.shape[1]], places)
    assert torch.equal(part, rope(x[..., : 2 * rope.cos.shape[1]])[:, :, places[0]])


def test_a_sequence_that_cp_does_not_divide() -> None:
    options = Options(size=Size.nano, seq_len=30)
    with pytest.raises(UsageError, match=r"--seq-len 30 .* the 8 parts .*; the next that is: 32"):
        options.check_sizes(p3d.MeshLayout(cp=4))
    replace(options, seq_len=32).check_sizes(p3d.MeshLayout(cp=4))


# ---- data: the same bytes on every rank, in an order that depends on the seed alone ----


def test_a_folder_is_its_files_sorted(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("one ")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.py").write_text("no")
    assert read_text(tmp_path) == b"one two"
    assert read_text(tmp_path / "b.txt") == b"two"


def test_python_source_by_default() -> None:
    text = read_text()
    assert len(text) > 1_000_000 and b"def " in text[:100_000]


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_text(tmp_path / "nowhere")


@pytest.mark.parametrize("count", [*range(1, 20), 64, 65, 1000, 4097])
def test_a_shuffle_has_each_number_once(count: int) -> None:
    orders = [[shuffled(i, count, key=key) for i in range(count)] for key in ("0 0", "0 1")]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 10 or (orders[0] != orders[1] and orders[0] != sorted(orders[0]))


def test_the_order_is_the_same_everywhere_and_for_ever() -> None:
    """Runs that were begun with another version go on with it."""
    assert [shuffled(i, 10, key="7 1") for i in range(10)] == [6, 0, 9, 2, 1, 7, 8, 3, 4, 5]


def test_a_shuffle_keeps_no_neighbours_together() -> None:
    count = 10_000
    order = torch.tensor([shuffled(i, count, key="0 0") for i in range(count)])
    assert (order.diff().abs() == 1).sum() < 20  # of a random order: 2
    halves = (order[: count // 2] < count // 2).sum().item()
    assert abs(halves - count / 4) < 200  # of a random order: 25 at a time


def sequences(samples: Samples, first: int, batches: list[int]) -> list[int]:
    """The first bytes of the samples that such batches have."""
    rows = []
    for size in batches:
        rows += samples.batch(first, size)[:, 0].tolist()
        first += size
    return rows


def test_an_epoch_has_every_sequence_once_however_it_is_split() -> None:
    samples = Samples(bytes(range(201)), 4, seed=3)
    assert len(samples) == 50
    epochs = sequences(samples, 0, [100])
    for splits in ([50, 50], [16] * 6 + [4], [1] * 100, [30, 7, 63]):
        assert sequences(samples, 0, splits) == epochs
    assert sorted(epochs[:50]) == sorted(epochs[50:]) == list(range(0, 200, 4))
    assert epochs[:50] != epochs[50:]
    assert sequences(samples, 37, [10, 53]) == epochs[37:]
    ranks = [samples.batch(24 + 6 * rank, 6) for rank in range(4)]
    assert torch.equal(torch.cat(ranks), samples.batch(24, 24))


def test_samples() -> None:
    text = bytes(range(201))
    one = Samples(text, 8, seed=1)
    rows = one.batch(3, 4)
    assert rows.shape == (4, 9) and rows.dtype == torch.long
    assert torch.equal(rows[:, 1:] - rows[:, :-1], torch.ones(4, 8, dtype=torch.long))
    assert not torch.equal(rows, Samples(text, 8, seed=2).batch(3, 4))
    assert one.digest == Samples(text, 4, seed=2).digest != Samples(text[1:], 8, seed=1).digest
    assert len(Samples(text[:9], 8, seed=0)) == 1
    with pytest.raises(ValueError, match="8 bytes are no sequence of 9"):
        Samples(text[:8], 8, seed=0)


# ---- runs ----


def test_the_help_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("Trains.", ["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: [torchrun --nproc-per-node RANKS] ") and "[--tp" not in said
    under = said.partition("\ncheckpoints:\n")[2].partition("\n\n")[0]
    assert "--save-every" in under and "--tp" not in under
    assert said.count(":\n  --") == 6


def test_a_checkpoint_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(path=tmp_path / "step-00000001", extra={"epoch": 1})
    monkeypatch.setattr(p3d.checkpoint, "latest", lambda folder: info.path)
    monkeypatch.setattr(p3d.checkpoint, "load", lambda *args: info)
    run = Run(tmp_path, {"--seed": 0}, every=1, keep=1, background=False)
    nothing: Any = None
    with pytest.raises(p3d.CheckpointError, match="a run with --seed None; this one has 0"):
        run.resume(nothing, nothing, nothing)


def test_the_step_logs_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    with fake_world(0, 2):
        StepLog(path, p3d.MeshLayout(1, 2, 1), torch.device("cpu")).start(3, 12)
    assert path.read_text().startswith('{"event": "start", "step": 3')


def test_a_dry_run_leaves_the_step_log_alone(tmp_path: Path) -> None:
    with fake_world(0, 2), running(None, nullcontext):
        log = StepLog(tmp_path / "steps.jsonl", p3d.MeshLayout(1, 2, 1), torch.device("cpu"))
        log.start(0, 0)
    assert not list(tmp_path.iterdir())
