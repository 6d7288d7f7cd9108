"""The pages build without a warning, every public name is in the reference, every link leads somewhere."""

import contextlib
import importlib
import io
import re
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import parallel3d

pytest.importorskip("sphinx", reason="needs the extra docs: sphinx, myst-parser, furo")
pytest.importorskip("myst_parser", reason="needs the extra docs")
pytest.importorskip("furo", reason="needs the extra docs")

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"


def public() -> set[str]:
    """Every name of every ``__all__`` that is no package, with its package."""
    packages = {"parallel3d", "parallel3d.mesh", "parallel3d.testing"}
    packages |= {
        f"parallel3d.{n}"
        for n in parallel3d.__all__
        if isinstance(getattr(parallel3d, n), ModuleType)
    }
    return {
        f"{package}.{name}"
        for package in packages
        for name in importlib.import_module(package).__all__
        if not isinstance(getattr(importlib.import_module(package), name), ModuleType)
    }


class Links(HTMLParser):
    """The targets of a page's links and pictures, and the places in it that links can have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.add(value)
            elif value and name == "id":
                self.places.add(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the pages; this process, which has torch already, builds them."""
    from sphinx.cmd.build import main

    folder = tmp_path_factory.mktemp("docs")
    path, modules = list(sys.path), set(sys.modules)
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
        warnings.catch_warnings(action="ignore"),  # of one of these packages about another
    ):
        code = main(["-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(folder)])
    sys.path[:] = path
    for name in {"public_names"} - modules:
        sys.modules.pop(name, None)
    assert code == 0, re.sub(r"\x1b\[[\d;]*m", "", said.getvalue())
    yield folder


@pytest.mark.xdist_group("sphinx")  # one worker builds the site
def test_every_public_name_is_in_the_reference(built: Path) -> None:
    pages = (built / "api").glob("*.html")
    described = set[str]().union(*(Links(page.read_text()).places for page in pages))
    missing = sorted(public() - described)
    assert not missing, "has each package a page in docs/api?"


@pytest.mark.xdist_group("sphinx")  # one worker builds the site
def test_links_inside_lead_somewhere(built: Path) -> None:
    pages = {page: Links(page.read_text()) for page in built.rglob("*.html")}
    lost = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or (not parts.path and not parts.fragment):
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            known = path in pages and (
                not parts.fragment or unquote(parts.fragment) in pages[path].places
            )
            if not known and (path.suffix == ".html" or not path.exists()):
                lost.append(f"{page.relative_to(built)}: {target}")
    assert not lost
