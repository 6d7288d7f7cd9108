"""The programs of README.md, docs/ and examples/ as a user starts them, for the tools that take one."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

import parallel3d as p3d
from _support.docs.doc_pages import PAGES, sections
from _support.docs.doc_runner import SETUPS
from _support.examples import EXAMPLES, ROOT, shown
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import script

OPTIONS = {"llama/train.py": ["--replicate", "2", "--shard", "2", "--tp", "2", "--size", "nano"]}
"""Of the examples whose first lines show no command."""


@dataclass(frozen=True)
class Program:
    """A program, which is written to a folder if it is a page's.

    Attributes:
        name: its path in examples, or the page with the line.
        ranks: how many it is for.
        options: its command line.
        code: of a page, else "".
        files: the page's files that it may import: name -> Python.
    """

    name: str
    ranks: int
    options: tuple[str, ...] = ()
    code: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its Python."""
        return self.code or (EXAMPLES / self.name).read_text()

    def path_in(self, folder: Path) -> Path:
        """Where it is; with the page's files beside it in ``folder``."""
        if not self.code:
            return EXAMPLES / self.name
        for name, text in (self.files | {"program.py": self.code}).items():
            (folder / name).write_text(text)
        return folder / "program.py"


def programs() -> list[Program]:
    """All of them; a page's blocks that run without a world are no programs for several ranks."""
    found = []
    for path in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("slurm/*.py")]):
        words, _ = shown(path)
        ranks = int(words[words.index("--nproc-per-node") + 1])
        options = words[words.index(path.relative_to(ROOT).as_posix()) + 1 :]
        found.append(Program(path.relative_to(EXAMPLES).as_posix(), ranks, tuple(options)))
    found += [Program(name, 8, tuple(options)) for name, options in OPTIONS.items()]
    for page in PAGES:
        for section in sections(page):
            setup = (SETUPS / f"{section.setup}.py").read_text() if section.setup else ""
            code = "\n\n".join([setup, section.code])
            if section.world == "gloo":
                found.append(Program(section.where, section.size, (), code, section.files))
    return found


@dataclass(frozen=True)
class Parallelized:
    """What a program gives to its first ``parallelize``."""

    model: nn.Module
    sizes: dict[str, int]
    tp_plan: Any

    def meta(self) -> nn.Module:
        """Returns the plain model as the program made it, on meta or not."""
        return copy.deepcopy(self.model)

    def build(self) -> nn.Module:
        """Returns the plain model, with values."""
        made = self.meta()
        if any(p.is_meta for p in made.parameters()):
            p3d.materialize(made, device="cpu", seed=0)
        return made


class _Found(BaseException):
    """Ends a program at its first ``parallelize``."""


def parallelized(program: Program, folder: Path) -> Parallelized | None:
    """Runs the program up to there as rank 0 of a world that communicates nothing; None if it never comes."""
    found: list[Parallelized] = []

    def record(model: nn.Module, mesh: Any, *, tp_plan: Any = None, **_: Any) -> None:
        sizes = p3d.mesh.build.read_layout(mesh).as_dict()
        found.append(Parallelized(model, sizes, tp_plan))
        raise _Found

    run = script(program.path_in(folder), program.options)
    with (
        started(folder),
        fake_world(0, program.ranks),
        mock.patch.object(p3d, "parallelize", record),
        contextlib.suppress(_Found),
    ):
        run()
    return found[0] if found else None


@contextlib.contextmanager
def started(folder: Path) -> Iterator[None]:
    """Within it a program may be started in ``folder``; what it imports from there is forgotten."""
    before = set(sys.modules)
    with contextlib.chdir(folder), mock.patch.dict(os.environ), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                place = getattr(sys.modules[name], "__file__", None) or ""
                if Path(place).parent == folder:
                    del sys.modules[name]


def module_with(name: str, **values: Any) -> ModuleType:
    """Returns a module with these values, that can be imported by ``name`` within ``mock.patch.dict``."""
    module = ModuleType(name)
    vars(module).update(values)
    return module
