"""A recipe of one's own: what it lacks or has too much is said, and what the planner can't know."""

import runpy
import sys
from pathlib import Path

import pytest

from parallel3d.errors import Parallel3dError

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
sys.path.append(str(RECIPES))

from recipe import read  # noqa: E402

EXPECTED = {"memory_gib", "tokens_per_second_per_gpu", "mfu", "step_seconds"}
MINE = """\
why = "mine, which [expected] nothing"

[cluster]
gpu = "h100"
nodes = 1
gpus_per_node = 8

[mesh]
shard = 8

[train]
size = "1b"
batch = 16
micro_batch = 2
seq_len = 4096
mixed_precision = true
checkpoint = "two words"
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The exit code, or the message."""
    monkeypatch.setattr(sys, "argv", ["recipe.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / "recipe.py"), run_name="__main__")
    return ended.value.code


def test_what_to_expect_is_written(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing was expected before, and a table comes after it."""
    assert run(monkeypatch, mine, "--expect") == 0
    expected = read(str(mine)).expected
    assert set(expected) == EXPECTED
    assert mine.read_text().startswith(MINE)
    head, cluster = MINE.split("[cluster]")
    cluster, rest = cluster.split("[mesh]")
    mine.write_text(f"{head}[expected]\nmfu = 1\n\n[mesh]{rest}\n[cluster]{cluster}")
    assert run(monkeypatch, mine, "--expect") == 0
    assert read(str(mine)).expected == expected and read(str(mine)).cluster["nodes"] == 1


def test_what_is_shown(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, mine) == 0
    said = capsys.readouterr().out
    assert f"recipe.py {mine} --to slurm" in said and "--checkpoint 'two words'" in said


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("micro_batch", "microbatch", r"\[train\] has 'microbatch'.* did you mean micro_batch\?"),
        ("nodes", "node", r"\[cluster\] has 'node'.* did you mean nodes\?"),
        ("shard", "share", r"\[mesh\] has 'share'.* did you mean shard\?"),
        ("why", "whi", "has 'whi'.* did you mean why"),
        ('size = "1b"', "", r"\[train\] lacks size"),
        ("[mesh]\nshard = 8", "mesh = 8", "lacks mesh"),
        ("= 8", "=", "is no TOML"),
    ],
)
def test_a_file_that_is_wrong(mine: Path, old: str, new: str, text: str) -> None:
    mine.write_text(MINE.replace(old, new))
    with pytest.raises(Parallel3dError, match=text):
        read(str(mine))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("hfsdp = true", "hfsdp = True"),
        ('dtype = "float64"', "dtype = 'float64'"),
    ],
)
def test_what_the_planner_does_not_know(mine: Path, option: str, text: str) -> None:
    mine.write_text(f"{MINE}{option}\n")
    with pytest.raises(Parallel3dError, match=f"the planner does not know {text}"):
        read(str(mine)).prediction()


def test_a_pool_that_is_too_small(mine: Path) -> None:
    """A loss in chunks is known, and offload with a pool for all that layers keep."""
    more = 'loss_parallel = "chunked"\nactivation_checkpointing = "offload"\noffload_gib = '
    mine.write_text(f"{MINE}{more}4.0\n")
    with pytest.raises(
        Parallel3dError, match=r"offload_gib is 4\.0, and what layers keep takes \d"
    ):
        read(str(mine)).prediction()
    mine.write_text(f"{MINE}{more}64.0\n")
    found = read(str(mine)).prediction()
    assert found.workload.chunked_loss and 4 * 2**30 < found.memory.host < 64 * 2**30
    assert set(read(str(mine)).expectation()) == {"host_gib", *EXPECTED}


def test_options_left_out_are_train_pys(mine: Path) -> None:
    """As the program takes them: all rows of the batch at once, weights in float32."""
    mine.write_text(MINE.replace("micro_batch = 2\n", "").replace("mixed_precision = true\n", ""))
    work = read(str(mine)).prediction().workload
    assert (work.micro_batch, work.precision, work.param_dtype) == (2, "fp32", "fp32")
    mine.write_text(f'{MINE}dtype = "bfloat16"\n')
    assert read(str(mine)).prediction().workload.param_dtype == "bf16"


def test_errors_are_messages(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "image" in str(run(monkeypatch, mine, "--to", "jobset"))
    assert "did you mean slurm" in str(run(monkeypatch, mine, "--to", "slrum"))
    assert "there is no recipe 'none'" in str(run(monkeypatch, "none"))
