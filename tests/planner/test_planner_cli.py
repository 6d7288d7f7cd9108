"""The commands plan and predict, and the page they write."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from _support.tools.pages import MOST_BYTES, check_fills, check_texts
from click.testing import Result
from typer.testing import CliRunner

from parallel3d.planner import report
from parallel3d.tools.cli.app import app
from parallel3d.tools.cli.setup import usual_batch

pytestmark = pytest.mark.ci

PROFILE = Path(__file__).parents[2] / "benchmarks" / "published" / "h200_profile.toml"
SHAPES = "layers=16,hidden=2048,heads=16,kv_heads=8,ffn=5504,vocab=32000"
SETUP = ["--model", SHAPES, "--gpu", "a100-80gb-sxm", "--nodes", "2", "--seq-len", "2048"]
PLAN = ["plan", *SETUP, "--global-batch", "64", "--checkpointing", "none"]
PREDICT = ["predict", *SETUP, "--micro-batch", "2", "--shard", "8", "--tp", "2"]


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "130"}).invoke(app, list(words))


def test_plan_shows_layouts_refusals_the_best_and_sensitivity() -> None:
    result = run(*PLAN, "--top", "3")
    assert result.exit_code == 0, result.output
    for words in (
        *("3 of", "tokens/s/GPU", " refused", "tp 16 is more than", "memory at its peak"),
        *("the best: ", "matmul forward", "if this were", "memory bandwidth"),
    ):
        assert words in result.stdout


def test_it_says_how_to_run_the_fastest_and_tries_a_chunked_loss() -> None:
    words = ["--model", "llama-3.1-8b", "--gpu", "h100", "--nodes", "4", "--micro-batch", "4"]
    text = run("plan", *words, "--seq-len", "8192", "--checkpointing", "full").stdout
    found = re.search(r"the best: replicate (\d+), shard (\d+), tp (\d+);", text)
    assert found is not None
    mesh = "--replicate {} --shard {} --tp {}".format(*found.groups())
    commands = text.replace(" \\\n    ", " ")
    assert (
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        f"train.py {mesh}\n" in commands
    )
    assert "chunked" in text.split("layouts refused")[0]
    launch = commands[commands.index("parallel3d launch ") :].splitlines()[0].split()
    assert run(*launch[1 : launch.index("--out")], "train.py").exit_code == 0
    for option, is_chunked in (("--chunked-loss", True), ("--no-chunked-loss", False)):
        found = run("plan", *words, "--seq-len", "8192", option, "--checkpointing", "full").stdout
        assert ('loss_parallel="chunked"' in found) == is_chunked


def test_float8_is_torchaos() -> None:
    words = [{"a100-80gb-sxm": "h100"}.get(word, word) for word in PLAN]
    text = run(*words, "--float8").stdout
    fast, plain = (json.loads(run(*words, *more, "--json").stdout) for more in (["--float8"], []))
    assert fast["layouts"][0]["step_seconds"] < plain["layouts"][0]["step_seconds"]
    assert "convert_to_float8_training(model)" in text.split("to run it")[1]


def test_defaults_are_said() -> None:
    """The sequence of the config, 8192 at most; a step of about 4M tokens."""
    base = ["plan", "--gpu", "h100", "--nodes", "2", "--checkpointing", "none"]
    text = run(*base, "--model", "gpt2").stdout
    assert "--seq-len 1024 (the model takes 1,024), --global-batch 4096 (4.19 M tokens" in text
    text = run(*base, "--model", "llama-3.1-8b", "--checkpointing", "full").stdout
    assert "--seq-len 8192 (the model takes 131,072), --global-batch 512 (4.19 M tokens" in text
    text = run(*base, "--model", "gpt2", "--seq-len", "512", "--micro-batch", "1").stdout
    assert "by default" not in text
    assert (
        "by default: --micro-batch 1" in run("predict", *SETUP, "--shard", "8", "--tp", "2").stdout
    )


def test_theusual_batch_divides() -> None:
    assert usual_batch(4096, 24) == 1032  # 43 times 24
    assert usual_batch(8192, 3 * 2**14) == 512 and usual_batch(2**30, 8) == 1


OWN = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
def build():
    return nn.Sequential(nn.Embedding(1000, 256), *(Block() for _ in range(3)), nn.Linear(256, 1000))
def fails():
    raise KeyError("size")
def images():
    return nn.Sequential(nn.Conv2d(3, 256, 4, 4), nn.Flatten(2), Block2())
def with_example():
    return images(), ((torch.randn(2, 3, 16, 16),), {})
class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_an_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the current folder, built on the meta device."""
    (tmp_path / "planned_here.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = ["--gpu", "h100", "--gpus-per-node", "4", "--json"]
    result = run("plan", "--model", "planned_here:build", *words)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["model"] == "planned_here:build" and data["best"]["layout"]["tp"] >= 1
    assert {c["layout"]["tp"] for c in data["layouts"]} == {1, 2, 4}
    wrong = run("plan", "--model", "planned_here:biuld", *words)
    assert wrong.exit_code == 2 and "the nearest: build" in wrong.stderr
    fails = run("plan", "--model", "planned_here:fails", *words)
    assert "planned_here:fails raised KeyError: 'size', at" in fails.stderr
    assert "planned_here.py:13, in fails" in fails.stderr
    words += ["--seq-len", "16"]
    assert (
        "planned_here:images may return (model, example)"
        in run("plan", "--model", "planned_here:images", *words).stderr
    )
    assert run("plan", "--model", "planned_here:with_example", *words).exit_code == 0


def test_a_refusal_is_of_the_best_settings() -> None:
    """What is nearest to fit of all that was tried, with its settings in words."""
    words = ["plan", "--model", "llama-3.1-70b", "--gpu", "h100", "--nodes", "1", "--json"]
    data = json.loads(run(*words, "--seq-len", "8192").stdout)
    whole = next(r for r in data["refused"] if r["layout"]["replicate"] == 8)
    assert "micro-batch 1, checkpointing " in whole["reason"] and "GiB of " in whole["reason"]


def test_json_is_alone_on_stdout_and_has_the_plan() -> None:
    result = run(*PLAN, "--json", "--top", "2", "--explain")
    data = json.loads(result.stdout)
    assert len(data["candidates"]) == len(data["layouts"]) == 2
    assert data["best"] == data["candidates"][0] == data["layouts"][0]
    assert data["refused"] and data["pareto"] and set(data["sensitivity"]) >= {"nic", "seq_len"}
    assert any("arXiv" in line for line in data["explanation"])


def test_what_each_kind_of_recomputation_costs() -> None:
    words = [*PLAN[:-2], "--json"]
    data = json.loads(run(*words).stdout)
    kinds = [each["checkpointing"] for each in data["recomputation"]]
    assert kinds == ["none", "selective", "offload", "full"]
    assert {
        each["checkpointing"]
        for each in json.loads(run(*words, "--top", "99").stdout)["candidates"]
    } <= set(kinds)
    text = run(*PLAN[:-2]).stdout
    for words in ("the best layout with each kind of checkpointing", "\noffload ", "on the host"):
        assert words in text
    assert "parallelize(model, mesh,\n      activation_checkpointing=False,\n" in text
    assert "fsdp=Sharding(reshard_" in text


def test_short_steps_have_digits() -> None:
    words = ["--gpu", "h100", "--model", SHAPES, "--seq-len", "128", "--global-batch", "16"]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["plan", *words, "--top", "1"])
    assert re.search(r"%  +0\.\d{3}\n", result.stdout), result.stdout


def test_arguments_of_hfsdp_are_those_of_parallelize() -> None:
    text = run(*PLAN[:-2], "--hfsdp", "--replicate", "2").stdout
    call = text[text.index("parallelize(model, mesh,") :]
    call = call[: call.index("\n  )")]
    assert "fsdp=Sharding(reshard_after_forward=" in call
    assert ", shard_optimizer_over_replicate=True)" in call.replace("\n", "")
    assert "\n      shard_optimizer" not in call  # an argument of its own is the old spelling


def test_long_sequences_are_cut_over_cp(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    base = ["--gpu", "h100", "--model", "llama-3.1-8b", "--seq-len", "262144", "--chunked-loss"]
    text = run("plan", *base, "--global-batch", "8", "--tp", "1", "--html", str(path)).stdout
    found = re.search(r"the best: replicate 1, shard (\d), cp (\d), tp 1;", text)
    assert found is not None and int(found[1]) * int(found[2]) == 8
    assert "(replicate x shard x cp x tp; GiB)" in text and "attention over cp: " in text
    assert f"--shard {found[1]} --cp {found[2]} --tp 1" in text
    assert re.search(r"activation_checkpointing=.*,\n.*,\n      context_parallel='[a-z]+',", text)
    page = Page(path.read_text(encoding="utf-8")).text
    assert "attention over cp" in page and "context parallel" in page
    one = ["predict", *base, "--cp", "8", "--shard", "1", "--checkpointing", "full", "--json"]
    data = json.loads(run(*one, "--cp-attention", "gather").stdout)
    assert data["layout"]["cp"] == 8 and data["cp_attention"] == "gather"
    asked = run("plan", *base, "--global-batch", "8", "--cp", "2", "--cp", "4", "--json").stdout
    assert {each["layout"]["cp"] for each in json.loads(asked)["candidates"]} <= {2, 4}


def test_layouts_with_ep() -> None:
    """In the table, in JSON, and in the commands, which launch takes."""
    words = [
        "--model",
        "mixtral-8x7b",
        "--gpu",
        "a100-80gb-sxm",
        "--nodes",
        "4",
        "--seq-len",
        "4096",
    ]
    text = run("plan", *words, "--micro-batch", "1", "--ep", "8").stdout
    assert "32\N{MULTIPLICATION SIGN}1 ep8" in text and "expert parallel" in text
    commands = text.replace(" \\\n    ", " ")
    launch = commands[commands.index("parallel3d launch ") :].splitlines()[0].split()
    assert launch[launch.index("--ep") + 1] == "8"
    assert run(*launch[1 : launch.index("--out")], "train.py").exit_code == 0
    one = run("predict", *words, "--shard", "32", "--ep", "4", "--routing", "zipf:1.2", "--json")
    found = json.loads(one.stdout)
    assert (found["layout"]["ep"], found["routing"]) == (4, "zipf:1.2")
    assert found["seconds"]["expert parallel"] > 0
    wrong = run("predict", *words, "--shard", "32", "--ep", "16")
    assert wrong.exit_code == 2 and "ep 16 is more than the 8 experts" in wrong.output


def test_constraints_reach_the_plan() -> None:
    words = ["--tp", "2", "--tp", "4", "--replicate", "2"]
    words += ["--micro-batch", "1", "--memory-limit", "20"]
    data = json.loads(run(*PLAN, *words, "--json", "--top", "99").stdout)
    assert {c["layout"]["tp"] for c in data["candidates"]} <= {2, 4}
    assert {c["layout"]["replicate"] for c in data["candidates"]} == {2}
    assert {c["micro_batch"] for c in data["candidates"]} == {1}
    assert max(c["needed_gib"] for c in data["candidates"]) <= 20


def test_predict_shows_one_layout_and_explains_it() -> None:
    result = run(*PREDICT, "--explain")
    assert result.exit_code == 0, result.output
    for words in (
        *("replicate 1, shard 8, tp 2", "fits", "tensor parallel", "how each number is computed"),
        "overlap_slowdown = 0.19",
    ):
        assert words in result.stdout


def test_predict_says_what_plan_would_refuse() -> None:
    words = ["--micro-batch", "1", "--tp", "16"]
    assert "plan would refuse" in run("predict", *SETUP, *words).stdout
    assert "tp 16" in json.loads(run("predict", *SETUP, *words, "--json").stdout)["refused"]


def test_options_reach_the_workload() -> None:
    base = json.loads(run(*PREDICT, "--json").stdout)
    sizes = "--optimizer sgd,--param-dtype bf16,--no-loss-parallel,--compile,--chunked-loss"
    times = "--nic 1,--no-sequence-parallel,--reduce-dtype bf16"
    for key, options in (
        ("allocated_gib", f"{sizes},--checkpointing selective"),
        ("step_seconds", times),
    ):
        for words in options.split(","):
            other = json.loads(run(*PREDICT, *words.split(), "--json").stdout)
            assert other[key] != base[key], words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--model", SHAPES, "--gpu", "h100x", "--seq-len", "8"], "the nearest: h100"),
        (["predict", "--model", SHAPES, "--gpu", "h100"], "--seq-len"),
        (["predict", *SETUP, "--micro-batch", "1", "--shard", "3"], "16"),
        (["predict", *SETUP, "--micro-batch", "1", "--optimizer", "adamx"], "adamw_8bit"),
        (
            ["predict", "--model", "layers=2,hidden=8", "--gpu", "h100", "--seq-len", "8"],
            "lacks heads",
        ),
        (["predict", *SETUP, "--profile", "no/such.toml"], "no/such.toml"),
        (["predict", *SETUP, "--profile", str(PROFILE)], "nvidia-h200; name"),
        (["predict", *SETUP, "--float8-scaling", "rowwise"], "give float8=True"),
        (["predict", *SETUP, "--float8"], "a100-80gb-sxm has no float8 matmuls"),
        (["calibrate", "--out", "no/such/folder.toml"], "there is no folder no/such"),
        ([*PLAN, "--memory-limit", "1"], "comes closest"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and says in result.stderr
    assert len(result.stderr.splitlines()) == 1 and "Traceback" not in result.output


MISTAKES = {
    "plan": ["which model? Give --model a name", "which GPU? Give --gpu a name, for example h100"],
    "plan --model layers=2,hiden=8,heads=x --seq-len 0 --nic -1 --gpus-per-node 0": [
        "which GPU?",
        "--model has 'hiden=8'; shapes are name=value, the nearest: hidden, tied",
        "--model has heads=x; it must be an int",
        "--model lacks hidden, ffn, vocab: shapes need layers, hidden, heads, ffn, vocab",
        "--seq-len is 0; it must be an int, 1 or more",
        "--gpus-per-node is 0",
    ],
    "predict --model llama-3.1-8x --gpu h100x --stack fsdp --precision q --micro-batch 0": [
        "'llama-3.1-8x' is no file and no model that is known by name; the nearest: llama-3.1-8b",
        "--precision is 'q'; it must be one of bf16, fp16, fp32",
        "there is no stack 'fsdp'; the nearest: fsdp",
        "--micro-batch is 0",
        "there is no GPU 'h100x'; the nearest: h100",
    ],
    "plan --model no.such:module --gpu h100 --nodes 0 --nic -1 --html no/page.html": [
        "--model is no.such:module; there is no module 'no'",
        "--nodes is 0",
        "--nic is -1.0; it must be a number GB/s above 0",
        "--html is no/page.html; there is no folder no",
    ],
    "plan --model gpt2 --gpu h100 --tp 3 --shard 16 --checkpointing full --checkpointing fill": [
        "--checkpointing is 'fill'",
        "--tp is 3; it must divide the 8 GPUs, as 1, 2, 4 do",
        "--shard is 16; it must divide the 8 GPUs, as 2, 4, 8 do",
    ],
    "predict --model gpt2 --gpu h100 --shard 3 --routing hott": ["routing is", "or 8. Nearest"],
    "plan --model gpt2 --gpu h100 --lora r16 --precision q --stack no.toml --optimizer x": [
        "--lora is 'r16'; it must be a rank, 16, or rank=16",
        "--precision is 'q'",
        "the stack no.toml can't be read",
        "--optimizer is 'x'",
    ],
    "predict --model gpt2 --gpu h100 --pp 0 --schedule x --micro-batch 0 --shard 3": [
        "schedule is 'x'; it must be one of 1f1b",
        "--pp is 0; it must be an int, 1 or more",
        "--micro-batch is 0",
        "or 8. Nearest",
    ],
    "predict --model gpt2 --gpu h100 --pp 3 --virtual 2 --precision q": [
        "--precision is 'q'",
        "3 stages don't divide 8 GPUs",
    ],
    "calibrate --run no/log.jsonl --run no/other.jsonl --gpu h100 --out no/out.toml": [
        "which model?",
        "--run is no/log.jsonl; there is no such file",
        "--run is no/other.jsonl; there is no such file",
        "--out is no/out.toml",
    ],
    "calibrate --device tpu --seconds 0 --out no/out.toml": [
        "--device is 'tpu'; it must be one of cuda, cpu",
        "--seconds is 0.0; it must be a number above 0",
        "--out is no/out.toml",
    ],
    "predict --seq-len x --modl gpt2 --nodes 1.5": [
        "there is no option --modl; the nearest: --model",
        "--nodes 1.5: ",
        "--seq-len x: ",
    ],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_all_mistakes_are_said_at_once(words: str) -> None:
    result = CliRunner().invoke(app, words.split())
    first, *lines = result.stderr.splitlines()
    assert result.exit_code == 2 and first == f"error: {len(lines)} mistakes:"
    assert len(lines) >= len(MISTAKES[words])
    for says in MISTAKES[words]:
        assert any(says in line for line in lines), (says, lines)


def test_mistakes_are_found_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """Neither torch nor the user's own module."""
    (tmp_path / "slow.py").write_text("raise SystemExit('imported')")
    words = "plan --model slow:build --gpu h100x --optimizer x"
    command = [sys.executable, "-X", "importtime", "-m", "parallel3d", *words.split()]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "error: 2 mistakes:" in found.stderr and found.returncode == 2
    assert "rich.table" in imported and not imported & {"torch", "numpy", "transformers"}


class Page(HTMLParser):
    """Tags that are open, what they point to, the figures, the text."""

    VOID = ("meta", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.figures = ""
        self.text = ""
        self._figures = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "action")]
        self.ids.add(given.get("id", ""))
        self._figures = given.get("id") == "figures"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.figures += data if self._figures else ""
        else:
            self.text += data


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    model = f"name=</script><b>a&b,{SHAPES}"
    result = run("plan", "--model", model, *PLAN[3:], "--json", "--html", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == "</script><b>a&b"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_needs_no_network_and_escapes_names(page: Page) -> None:
    assert page.open == [] and page.links == []
    assert "</script><b>a&b on 16" in page.text
    assert page.ids >= {"pareto", "memory", "time", "timeline", "figures"}
    for words in ("tokens/s/GPU", "Refused", "tp 16 is more than", "arXiv:2507.03114"):
        assert words in page.text


def test_charts_show_each_kind_in_a_look_of_its_own(page: Page) -> None:
    figures = json.loads(page.figures)
    timelines = [each["figure"] for each in figures.pop("timelines")]
    check_fills([*figures.values(), *timelines])
    for fills in (report._MEMORY.values(), report._TIME.values()):
        assert len({*fills, report._OTHER}) == len(fills) + 1
    (mark,) = figures["memory"]["marks"]
    assert mark["text"].startswith("capacity 7") and "colour" not in mark
    stacked = figures["time"]["series"]
    assert {"matmul", "stragglers"} <= {each["name"] for each in stacked}
    first = [zip(s["row"], s["from"], s["to"], strict=True) for s in stacked]
    ends = sorted((begin, end) for each in first for row, begin, end in each if row == 0)
    assert all(b == pytest.approx(e, abs=2e-5) for (_, e), (b, _) in pairwise(ends))


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_opens_in_a_browser(html: str, tmp_path: Path, width: int) -> None:
    check_texts(html, tmp_path, 4, width)


def test_the_largest_page_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    words = ["--gpu", "h100", "--nodes", "2048", "--seq-len", "8192", "--global-batch", "4096"]
    assert run("plan", "--model", "llama-3.1-405b", *words, "--html", str(path)).exit_code == 0
    assert 1e5 < path.stat().st_size < MOST_BYTES


def test_a_prediction_that_does_not_fit_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    shapes = SHAPES.replace("layers=16", "layers=900")
    words = ["--gpu", "a100", "--seq-len", "2048", "--micro-batch", "1", "--html", str(path)]
    assert run("predict", "--model", shapes, *words).exit_code == 0
    assert "does not fit" in Page(path.read_text(encoding="utf-8")).text


def test_the_command_needs_no_torch() -> None:
    code = "import sys, parallel3d.tools.cli.app; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from parallel3d.tools.cli import main; main()"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "pip install typer rich" in found.stderr and "'.[cli]'" in found.stderr
    assert "Traceback" not in found.stderr


def test_what_may_not_fit_is_said_behind_its_speed() -> None:
    """8B on 8 H100 without recomputation is faster than the best, and fits in 86 of 100 cases."""
    words = "plan --model llama-3.1-8b --gpu h100 --seq-len 8192 --global-batch 512"
    text = run(*words.split()).stdout
    kinds = text.split("the best layout with each kind")[1].split("if this were")[0]
    assert re.search(r"^ ?none .*, \d\d% to fit", kinds, re.MULTILINE)
    assert not re.search(r"^ ?selective .* to fit", kinds, re.MULTILINE)
    assert re.search(r"faster, if it fits \(\d\d%\): ", text)
