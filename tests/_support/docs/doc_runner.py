"""Running what doc_pages finds: a section's Python on some world, in a folder of its own."""

import contextlib
import io
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import distributed as dist

from _support.docs.doc_loops import REFUSED, steps_an_optimizer, watched
from _support.docs.doc_pages import Section
from parallel3d.testing import fake_world
from parallel3d.testing.worlds import destroy_group

SETUPS = Path(__file__).parent / "setups"


def execute(section: Section, folder: str) -> None:
    """Runs the section in this process, in ``folder``; tracebacks have the lines of the page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder), mock.patch.dict(os.environ), _importable(section, folder):
        if section.setup:
            path = SETUPS / f"{section.setup}.py"
            exec(compile(path.read_text(), str(path), "exec"), names)
        with watched(section, names) as steps:
            _run_blocks(section, names)
        loops = any(map(steps_an_optimizer, section.blocks)) and section.page.name not in REFUSED
        assert steps[0] or not loops or _only_dry(section), (
            f"{section.where}: its loop did not step"
        )


@contextlib.contextmanager
def _importable(section: Section, folder: str) -> Iterator[None]:
    """Puts the page's files so far where the section can import them. Ranks write the same."""
    for name, code in section.files.items():
        path = Path(folder, f"{name}.{os.getpid()}")
        path.write_text(code)
        path.replace(Path(folder, name))
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        try:
            yield
        finally:
            for name in section.files:
                sys.modules.pop(name.removesuffix(".py"), None)


def _only_dry(section: Section) -> bool:
    """Whether all that steps is run dry, which has no numbers."""
    return any("dryrun import record" in block.code for block in section.blocks)


def _run_blocks(section: Section, names: dict[str, Any]) -> None:
    for block in section.blocks:
        linecache.checkcache(str(block.page))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
        printed = [line.rstrip() for line in said.getvalue().rstrip().splitlines()]
        first = not dist.is_initialized() or dist.get_rank() == 0
        if block.prints is not None and first:
            shown = block.prints.rstrip().splitlines()
            assert printed == shown, f"{block.where} prints\n" + "\n".join(printed)


def run_here(section: Section, folder: Path) -> None:
    """As rank 0 of a fake world, or without a world."""
    if section.world == "fake":
        with fake_world(0, section.size):
            execute(section, str(folder))
        return
    try:
        execute(section, str(folder))
    finally:
        destroy_group()  # of one process, which build_mesh may have made
