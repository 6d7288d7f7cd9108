"""The page: complete, small, safe, and without an error in a browser."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from _support.tools.dryrun.made_runs import Llama, Program

pytest.importorskip("plotly")

from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.compare import compare
from parallel3d.tools.dryrun.report import write_report
from parallel3d.tools.dryrun.result import DryRun, DryRunWarning, MemorySample, Peak, UnknownRead
from parallel3d.tools.dryrun.timeline import COMPUTE, timeline
from parallel3d.tools.dryrun.trace import merged, thinned

LAYOUT = MeshLayout(2, 4, 2)
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&amp;\"'"


def report_html(run: DryRun, *args: Any, **options: Any) -> str:
    """What ``write_report`` writes."""
    with TemporaryDirectory() as folder:
        write_report(run, Path(folder, "page.html"), *args, **options)
        return Path(folder, "page.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Tags, ids, the text outside scripts, the figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.figures: dict[str, Any] = {}
        self._script: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name in given), given
        if tag in ("script", "style"):
            self._script = given.get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        elif self._script == "figures":
            self.figures = json.loads(data)


def hostile() -> DryRun:
    """A run whose every name is an attack."""
    program = Program(LAYOUT, module=EVIL)
    program.hold("activations", 2**30)
    index = program.issue("all_gather", "shard", 2**28, unit=EVIL, dtype=EVIL)
    program.matmul(8192, 8192, 8192, dtype=EVIL)
    program.wait(index)
    program.step = 1
    made = program.made(
        unknown=(UnknownRead(EVIL, EVIL, 2),), warnings=(DryRunWarning(EVIL, EVIL),)
    )
    parameter = replace(Llama().run(LAYOUT).parameters[0], name=EVIL, placements={EVIL: EVIL})
    largest = tuple(replace(t, module=EVIL, made_by=EVIL) for t in made.peak.largest)
    peak = replace(made.peak, module=EVIL, name=EVIL, largest=largest)
    return replace(made, parameters=(parameter,), peak=peak)


@pytest.fixture(scope="module")
def page() -> Reader:
    return Reader(report_html(Llama(layers=4).run(LAYOUT)))


def test_the_page_has_all_parts(page: Reader) -> None:
    for words in (
        *(
            "Dry run: rank 0 of 16",
            "replicate 2, shard 4, tp 2",
            "peak memory",
            "a step, predicted",
        ),
        *("Warnings (", "values read every step", "largest tensors", "optimizer state"),
        *("Collectives of a step", "reduce_scatter", "layers.3", "layers.*.attention.wq.weight"),
        *(
            "shard S(0)",
            "train.py:12, in main",
            "h100-80gb-sxm",
            "4096 \N{MULTIPLICATION SIGN} 4096",
        ),
    ):
        assert words in page.text, words
    assert "Compared with" not in page.text
    assert {"memory", "timeline", "figures"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags["h1"] == 1 and page.tags["input"] == 2
    assert set(page.figures) == {"memory", "timeline"}


def test_the_page_needs_no_network(page: Reader) -> None:
    assert page.links == []
    assert page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0


def test_the_charts_are_the_run() -> None:
    run = Llama(layers=4).run(LAYOUT)
    times = timeline(run)
    figures = Reader(report_html(run, times)).figures
    memory = figures["memory"]["data"]
    assert [trace["name"] for trace in memory] == [
        *("parameters", "optimizer state", "unsharded parameters", "activations")
    ]
    totals = [sum(values) for values in zip(*(trace["y"] for trace in memory), strict=True)]
    assert max(totals) == pytest.approx(run.peak.bytes / 2**30, abs=1e-3)
    marked = [note["text"] for note in figures["memory"]["layout"]["annotations"]]
    assert any(text.startswith("peak ") for text in marked)
    bars = {trace["name"]: sum(trace["x"]) for trace in figures["timeline"]["data"]}
    assert bars["waiting"] == pytest.approx(1e3 * sum(times.exposed().values()), rel=1e-3)
    busy = times.busy()
    together = sum(bars[name] for name in ("matmul", "attention", "elementwise"))
    assert together == pytest.approx(1e3 * busy["compute"], rel=1e-3)


def test_a_comparison_is_shown() -> None:
    a, b = Llama().run(LAYOUT, 0), Llama(skip=(1,)).run(LAYOUT, 2)
    for found in (report_html(a, other=b), report_html(a, divergence=compare(a, b))):
        text = Reader(found).text
        assert "Compared with rank 2" in text and "ranks 0 and 2 diverge at collective 1" in text
        assert "rank-dependent order" in text
    same = Reader(report_html(a, other=Llama().run(LAYOUT, 2))).text
    assert "Compared with rank 2" in same and "of both ranks match" in same


def test_the_training_has_a_peak_of_its_own() -> None:
    run = Llama().run(LAYOUT)
    early = Peak(0, 2**38, {"temporaries": 2**38}, "other", "", "normal_", ())
    text = Reader(report_html(replace(run, peak=early, step_peak=run.peak))).text
    assert "The peak is 256 GiB, in normal_ of no module" in text
    assert "The peak from the first forward on is" in text
    assert "in steps" in text  # on the card


def test_names_cannot_break_out() -> None:
    plain = Reader(report_html(Llama().run(LAYOUT)))
    found = Reader(report_html(hostile()))
    assert found.tags["script"] == plain.tags["script"]
    assert found.tags["img"] == 0
    assert found.text.count("alert(1)") > 5
    hover = [trace["customdata"] for trace in found.figures["timeline"]["data"]]
    assert "onerror" in str(hover) and "<img" not in str(hover)  # plotly reads tags


def test_a_run_without_anything() -> None:
    empty = replace(
        Llama().run(LAYOUT),
        operations=(),
        collectives=(),
        memory=(),
        parameters=(),
        mesh={},
        unknown=(),
        steps=0,
        peak=Peak(0, 0, {}, "", "", "", ()),
    )
    assert "no mesh" in Reader(report_html(empty)).text


def test_a_large_run_stays_small(tmp_path: Path) -> None:
    """126 layers, with more operations and samples than a page can have."""

    def before(program: Program, layer: int) -> None:
        for i in range(180):
            program.elementwise(10**7)
            program.hold("temporaries", 10**8 if i % 2 == 0 else -(10**8))

    run = Llama(layers=126, steps=1, before=before).run(LAYOUT)
    assert len(run.operations) > 20_000 and len(run.memory) > 20_000
    write_report(run, tmp_path / "page.html")
    assert 4e6 < (tmp_path / "page.html").stat().st_size < 7e6
    figures = Reader((tmp_path / "page.html").read_text()).figures
    assert sum(len(trace["x"]) for trace in figures["timeline"]["data"]) < 6000


def test_thinned_samples_keep_the_highest_and_lowest() -> None:
    samples = [MemorySample(i, {"inputs": 10 + i % 7}) for i in range(10_000)]
    samples[5_001] = MemorySample(5_001, {"inputs": 999})
    samples[7_003] = MemorySample(7_003, {})
    found = thinned(samples, 100)
    assert len(found) <= 104
    assert found[0] == samples[0] and found[-1] == samples[-1]
    assert samples[5_001] in found and samples[7_003] in found
    assert [s.operation for s in found] == sorted({s.operation for s in found})
    assert thinned(samples[:50], 100) == samples[:50]


@pytest.mark.parametrize("most", [10**6, 300, 100, 1])
def test_merged_bars_cover_the_same_time(most: int) -> None:
    spans = timeline(Llama(layers=20).run(LAYOUT)).of_step()
    bars = merged(spans, most)
    assert sum(bar.count for bar in bars) == len(spans)
    assert sum(bar.busy for bar in bars) == pytest.approx(sum(span.seconds for span in spans))
    assert len(bars) <= max(most, 40)
    for bar in bars:
        assert bar.busy <= bar.end - bar.start + 1e-12
    if most == 10**6:
        assert len(bars) == len(spans)
    assert any(bar.kind in (COMPUTE, "matmul") for bar in bars)


def test_long_waits_stay_visible() -> None:
    """Also where a thousand short ones are joined with the computation around them."""
    spans = timeline(Llama(layers=20, tokens=512).run(MeshLayout(1, 16, 2))).of_step()
    length = max(s.end for s in spans) - min(s.start for s in spans)
    long = [s for s in spans if s.kind == "wait" and s.seconds > length / 100]
    assert long
    bars = merged(spans, 400)
    assert len(bars) < len(spans)
    assert sum(b.busy for b in bars if b.kind == "wait") >= sum(s.seconds for s in long) - 1e-12


def in_browser(path: Path) -> tuple[str, list[str]]:
    """(the page after its scripts have run, what it wrote to the console)."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("needs chromium")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=5000"]
    command += ["--enable-logging=stderr", "--v=0", "--window-size=1200,2000", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    """With hostile names, so that an escape that is missing would show."""
    (tmp_path / "page.html").write_text(report_html(hostile()), encoding="utf-8")
    dom, console = in_browser(tmp_path / "page.html")
    assert console == []
    assert len(re.findall(r'class="main-svg"', dom)) >= 2  # both charts were drawn
    assert "1 rows" in dom  # the filter counted
    assert "<img" not in dom.split("<script", 1)[0]


def test_the_browser_would_tell_of_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<p>x</p><script>nothing.at_all();</script>")
    _, console = in_browser(tmp_path / "bad.html")
    assert console and "nothing is not defined" in console[0]
