"""Running what doc_pages finds: a section's Python on some world, in a folder of its own."""

import contextlib
import io
import linecache
import os
from pathlib import Path
from typing import Any
from unittest import mock

from doc_pages import Section

from parallel3d.testing import fake_world
from parallel3d.testing.worlds import destroy_group

SETUPS = Path(__file__).parent / "setups"


def execute(section: Section, folder: str) -> str:
    """Runs the section in this process, in ``folder``; returns what it printed.

    Tracebacks have the lines of the page.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), mock.patch.dict(os.environ):
        if section.setup:
            path = SETUPS / f"{section.setup}.py"
            exec(compile(path.read_text(), str(path), "exec"), names)
        for block in section.blocks:
            linecache.checkcache(str(block.page))
            exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
    return said.getvalue()


def run_here(section: Section, folder: Path) -> str:
    """As rank 0 of a fake world, or without a world."""
    if section.world == "fake":
        with fake_world(0, section.size):
            return execute(section, str(folder))
    try:
        return execute(section, str(folder))
    finally:
        destroy_group()  # of one process, which build_mesh may have made
