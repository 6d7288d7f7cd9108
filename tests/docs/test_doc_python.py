"""Every block of Python in README.md and docs/*.md runs."""

from pathlib import Path

import pytest
from _support.docs.doc_loops import LOOPS, NOT_RUN, steps_an_optimizer
from _support.docs.doc_pages import PAGES, SHELLS, Section, blocks, sections
from _support.docs.doc_runner import execute, run_here

from parallel3d.testing import GlooPool

pytestmark = pytest.mark.ci

SECTIONS = [section for page in PAGES for section in sections(page)]
HERE = [section for section in SECTIONS if section.world != "gloo"]
ON_RANKS = [section for section in SECTIONS if section.world == "gloo"]
# Their loops train beside the plain model, for seconds each; README, ten_minutes.md and others stay.
SLOW = {
    "README.md",  # eight processes
    "context_parallel.md",
    "expert_parallel.md",
    "from_accelerate.md",
    "from_fsdp2.md",
    "from_megatron_fsdp.md",
    "from_torchtitan.md",
    "index.md",
    "ten_minutes.md",
    "tutorial.md",
}


def marked(section: Section) -> object:
    marks = [pytest.mark.slow] if section.page.name in SLOW else []
    return pytest.param(section, id=section.where, marks=marks)


@pytest.mark.parametrize("section", [marked(s) for s in HERE])
def test_it_runs(section: Section, tmp_path: Path) -> None:
    run_here(section, tmp_path)


@pytest.mark.parametrize("section", [marked(s) for s in ON_RANKS])
def test_it_runs_on_ranks(section: Section, tmp_path: Path, gloo_pool: GlooPool) -> None:
    gloo_pool.run(execute, section, str(tmp_path), world_size=section.size)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_is_passed_over(page: Path) -> None:
    """A block is Python that runs, commands, output, or says why it is none of them."""
    for block in blocks(page):
        run = block.language in ("python", "text", *SHELLS)
        assert run or block.language.startswith("{") or block.not_run, (
            f"{block.where}: a block of {block.language!r}: give it a language that is run, "
            "or `text`, or a comment `not run: REASON` before it"
        )
        assert len(block.not_run.split()) > 2 or not block.not_run, f"{block.where}: what reason?"
        if block.not_run and block.language == "python":
            compile(block.code, str(page), "exec")  # Python it is, all the same


def test_loops_that_are_not_run_are_listed() -> None:
    """Those that are run are compared with the plain model, step by step: see doc_loops."""
    found = {
        block.page.name
        for page in PAGES
        for block in blocks(page)
        if block.language == "python" and block.not_run and steps_an_optimizer(block)
    }
    assert found == NOT_RUN.keys()
    assert LOOPS.keys() <= {page.name for page in PAGES}
