"""The page: complete, small, safe, and without an error in a browser."""

import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from _support.tools.dryrun.made_runs import Llama, Program
from _support.tools.pages import MOST_BYTES, check_fills, check_texts, in_browser

from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun import report
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


PARTS = (
    "Dry run: rank 0 of 16; replicate 2, shard 4, tp 2; peak memory; a step, predicted; Warnings (; "
    "values read every step; largest tensors; optimizer state; Collectives of a step; reduce_scatter; "
    "layers.3; layers.*.attention.wq.weight; shard S(0); train.py:12, in main; h100-80gb-sxm; "
    "4096 \N{MULTIPLICATION SIGN} 4096"
)


@pytest.fixture(scope="module")
def page() -> Reader:
    return Reader(report_html(Llama(layers=4).run(LAYOUT)))


def test_the_page_has_all_parts(page: Reader) -> None:
    for words in PARTS.split("; "):
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
    memory = figures["memory"]["series"]
    assert [each["name"] for each in memory] == [
        *("parameters", "optimizer state", "unsharded parameters", "activations")
    ]
    totals = [sum(values) for values in zip(*(each["y"] for each in memory), strict=True)]
    assert max(totals) == pytest.approx(run.peak.bytes / 2**30, abs=1e-3)
    assert any(mark["text"].startswith("peak ") for mark in figures["memory"]["marks"])
    timelines = figures["timeline"]["series"]
    bars = {each["name"]: sum(each["to"]) - sum(each["from"]) for each in timelines}
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
    assert "onerror" in str(found.figures["timeline"])  # which the script writes as text


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
    """126 layers, with more operations, samples, parameters and reads than a page can have."""

    def before(program: Program, layer: int) -> None:
        for i in range(180):
            program.elementwise(10**7)
            program.hold("temporaries", 10**8 if i % 2 == 0 else -(10**8))

    run = Llama(layers=126, steps=1, before=before).run(LAYOUT)
    assert len(run.operations) > 20_000 and len(run.memory) > 20_000
    experts = tuple(
        replace(p, name=f"{p.name}.experts.{i}") for i in range(5) for p in run.parameters
    )
    reads = tuple(UnknownRead(f"package/module_{i}.py:12, in main", "item", i) for i in range(5000))
    write_report(replace(run, parameters=experts, unknown=reads), tmp_path / "page.html")
    assert 3e5 < (tmp_path / "page.html").stat().st_size < MOST_BYTES
    figures = Reader((tmp_path / "page.html").read_text()).figures
    assert sum(len(each["row"]) for each in figures["timeline"]["series"]) < 6000


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


def test_no_two_kinds_look_alike() -> None:
    """Of all kinds there are, not only of those of one run."""
    for fills in (report._MEMORY.values(), [fill for _, fill in report._BARS.values()]):
        assert len(set(fills)) == len(fills)
    run = Llama(layers=4).run(LAYOUT)
    check_fills([*Reader(report_html(run)).figures.values()])


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_opens_in_a_browser(tmp_path: Path, width: int) -> None:
    """With hostile names, so that an escape that is missing would show."""
    dom = check_texts(report_html(hostile()), tmp_path, 2, width)
    assert ">1 row<" in dom  # the filter counted
    assert "<img" not in dom.split("<script", 1)[0]


def test_the_browser_would_tell_of_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<p>x</p><script>nothing.at_all();</script>")
    _, console = in_browser(tmp_path / "bad.html")
    assert console and "nothing is not defined" in console[0]


def test_the_browser_would_tell_of_texts_over_each_other(tmp_path: Path) -> None:
    texts = "".join(f'<text x="{40 * i}" y="20">{i}</text>' for i in range(5))
    page = '<body><div class="chart" id="one"><svg>{}</svg></div></body>'
    check_texts(page.format(texts), tmp_path, 1, 1200)
    with pytest.raises(AssertionError, match="over each other: 4 and late"):
        check_texts(page.format(texts + '<text x="161" y="22">late</text>'), tmp_path, 1, 1200)


POINTER = """<script>
function point(target, kind, x, y) {
  var given = { bubbles: true, clientX: x, clientY: y, pointerType: "mouse" };
  target.dispatchEvent(new PointerEvent(kind, given));
}
function tip(id) { return document.querySelector("#" + id + " .tip").textContent; }
function ticks() {
  var texts = document.querySelectorAll('#timeline .drawn > text[text-anchor="middle"]');
  return Array.from(texts).map(function (text) { return text.textContent; }).join(" ");
}
var said = [], box = document.querySelector("#timeline rect.bar").getBoundingClientRect();
point(document.querySelector("#timeline rect.bar"), "pointermove", box.left + 1, box.top + 1);
said.push(tip("timeline"));
var area = document.querySelector("#memory .drawn"), frame = area.getBoundingClientRect();
point(area, "pointermove", frame.left + 0.6 * frame.width, frame.top + 80);
said.push(tip("memory"));
said.push(ticks());
var line = document.querySelector("#timeline .drawn"), at = line.getBoundingClientRect();
point(line, "pointerdown", at.left + 0.4 * at.width, at.top + 50);
point(line, "pointermove", at.left + 0.5 * at.width, at.top + 50);
point(line, "pointerup", at.left + 0.5 * at.width, at.top + 50);
said.push(ticks());
document.querySelector("#timeline .drawn").dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
said.push(ticks());
var found = document.createElement("pre");
found.id = "said";
found.textContent = JSON.stringify(said);
document.body.appendChild(found);
</script>"""


def test_the_pointer_asks_and_zooms(tmp_path: Path) -> None:
    run = Llama(layers=4).run(LAYOUT)
    html = report_html(run).replace("</body>", POINTER + "</body>")
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    dom, console = in_browser(tmp_path / "page.html")
    assert console == []
    bar, memory, whole, zoomed, again = json.loads(dom.split('id="said">')[1].split("</pre>")[0])
    assert bar.startswith("optimizer: ") and bar.endswith(" ms")
    assert " ms" in memory and "optimizer state" in memory and "GiB" in memory
    ends = [[float(tick) for tick in each.split()[:-2]] for each in (whole, zoomed)]
    assert ends[0][0] == 0 < ends[1][0] and ends[1][-1] < ends[0][-1]
    assert again == whole
