"""Reports as a browser shows them, and rules for every chart."""

import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

MOST_BYTES = 1_000_000
STYLE = Path(__file__).parents[3] / "parallel3d" / "_util" / "page.css"
OKABE_ITO = {
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "green": "#009e73",
    "yellow": "#f0e442",
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "purple": "#cc79a7",
}

OVERLAPS = """<script>
document.querySelectorAll(".chart").forEach(function (chart) {
  var texts = Array.from(chart.querySelectorAll("text, .legend span"));
  var page = document.documentElement.clientWidth;
  var boxes = texts.map(function (text) { return text.getBoundingClientRect(); });
  var found = document.createElement("pre");
  found.className = "measured";
  found.textContent = chart.id + ": " + texts.length + " texts";
  document.querySelectorAll("h2 + p").forEach(function (p) {
    if (p.clientWidth < chart.clientWidth) found.textContent += "; narrower: " + p.textContent;
  });
  boxes.forEach(function (a, i) {
    if (a.left < 0 || a.right > page) found.textContent += "; outside: " + texts[i].textContent;
    boxes.forEach(function (b, j) {
      var beside = a.left > b.right - 1 || b.left > a.right - 1;
      if (i < j && !beside && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        found.textContent += "; over each other: " + texts[i].textContent + " and " + texts[j].textContent;
    });
  });
  document.body.appendChild(found);
});
</script>"""
"""Says for each chart which of its texts lie over each other or beyond the page, and what is narrower."""


def in_browser(path: Path, width: int = 1200) -> tuple[str, list[str]]:
    """(the page after its scripts have run, what it wrote to the console)."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("needs chromium")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=5000"]
    command += ["--enable-logging=stderr", "--v=0", f"--window-size={width},2000", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def check_texts(html: str, folder: Path, charts: int, width: int) -> str:
    """Every chart is drawn, and no text of it lies over another one; returns the page as it was shown."""
    path = folder / f"measured_{width}.html"
    path.write_text(html.replace("</body>", OVERLAPS + "</body>"), encoding="utf-8")
    dom, console = in_browser(path, width)
    assert console == []
    measured = re.findall(r'<pre class="measured">(.*?)</pre>', dom)
    assert len(measured) == charts
    for found in measured:
        assert re.fullmatch(r"\w+: ([5-9]|\d\d+) texts", found), found
    return dom


def check_fills(figures: list[dict[str, Any]]) -> None:
    """In no chart do two series look alike, and all colours are Okabe and Ito's, grey or the text's."""
    style = STYLE.read_text()
    for name, colour in OKABE_ITO.items():
        assert f"--{name}: {colour};" in style
    for figure in figures:
        looks = [(s["colour"], s.get("hatched"), s.get("shape")) for s in figure["series"]]
        assert len(looks) == len(set(looks)), looks
        assert set(chain(*looks)) & {"ink", "grey", *OKABE_ITO}
        assert {colour for colour, *_ in looks} <= {"ink", "grey", *OKABE_ITO}
