"""README.md and docs/*.md taken apart: every block of code, and how it is run.

A page's ``python`` blocks run one after another in one namespace. Comments, which no reader sees, say where:

    <!-- run: gloo 8, guards -->        from here on: eight gloo processes, after setups/guards.py
    <!-- run: fake 8 -->                ... as rank 0 of a fake world of eight
    <!-- run: process -->               ... in this process, without a world (so it is at the top of a page)
    <!-- run: gloo 4, file fsdp.py -->  ... and the reader is told to save this Python as fsdp.py
    <!-- not run: REASON -->            the next block is not run, for this reason: it is a peer's code
    <!-- output -->                     the next block is just what the Python before it prints (on rank 0)

Each ``run`` starts with an empty namespace, and can import the files of the page that come before it.
``sh``, ``bash``, ``console`` blocks, and nameless ones that begin with a command, are lines to run; ``text``
blocks are output or drawings. Others must say why not.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMENT = re.compile(r"<!--\s*(run|not run|output):?\s*(.*?)\s*-->", re.DOTALL)
RUN = re.compile(r"(?:(process)|(fake|gloo) (\d+))(?:, file (\w+\.py)|, (\w+))?")
SHELLS = ("sh", "bash", "console")
COMMANDS = ("parallel3d", "python", "torchrun", "pip", "pytest")


class PageError(ValueError):
    """A page that says something the tests don't understand."""


@dataclass
class Block:
    """A block of code. ``line`` is that of its first line in the page, from 1."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str = ""
    is_output: bool = False
    prints: str | None = None  # what it must print

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass
class Section:
    """Blocks of Python that share a namespace."""

    page: Path
    line: int
    world: str = "process"
    size: int = 1
    setup: str = ""
    file: str = ""  # what the page calls it
    files: dict[str, str] = field(
        default_factory=dict
    )  # the page's files before it: name -> Python
    blocks: list[Block] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def code(self) -> str:
        return "\n\n".join(block.code for block in self.blocks)


@dataclass(frozen=True)
class Command:
    """One command line of a page."""

    page: Path
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def parts(page: Path) -> Iterator[Block | Section]:
    """The page's blocks of code and beginnings of sections, in order."""
    not_run, is_output = "", False
    for token in _tokens(page.read_text()):
        if token.map is None:
            continue
        line = token.map[0] + 1
        if token.type == "html_block":
            for verb, words in COMMENT.findall(token.content):
                if verb == "not run":
                    not_run = words
                elif verb == "output":
                    is_output = True
                else:
                    yield _section(page, line, words)
        elif token.type in ("fence", "code_block"):
            fenced = token.type == "fence"
            language = token.info.split()[0] if token.info else unnamed(token.content)
            yield Block(page, line + fenced, language, token.content, not_run, is_output)
            not_run, is_output = "", False


@cache
def _tokens(text: str) -> list[Token]:
    """Several test files ask for the same pages."""
    return MarkdownIt("commonmark").parse(text)


def _section(page: Path, line: int, words: str) -> Section:
    match = RUN.fullmatch(words)
    if match is None:
        raise PageError(f"{page.name}:{line}: run: {words}: not as {Path(__file__).name} says")
    process, world, size, file, setup = match.groups()
    return Section(page, line, process or world, int(size or 1), setup or "", file or "")


def unnamed(code: str) -> str:
    """A block without a language is of commands if it begins with one, or else output or a drawing."""
    return "sh" if code.split()[0] in COMMANDS else "text"


def blocks(page: Path) -> list[Block]:
    """All of them."""
    return [part for part in parts(page) if isinstance(part, Block)]


def sections(page: Path) -> list[Section]:
    """Those of the page that have Python to run."""
    found = [Section(page, 1)]
    for part in parts(page):
        if isinstance(part, Section):
            found.append(part)
        elif part.language == "python" and not part.not_run:
            found[-1].blocks.append(part)
        elif part.is_output:
            if not found[-1].blocks:
                raise PageError(f"{part.where}: the output of what?")
            found[-1].blocks[-1].prints = part.code
    files: dict[str, str] = {}
    for section in found:
        section.files = dict(files)
        if section.file:
            files[section.file] = section.code
    return [section for section in found if section.blocks]


def commands(page: Path) -> list[Command]:
    """Command lines of the page's sh and console blocks; a ``\\`` at its end joins a line with the next."""
    found = []
    for block in blocks(page):
        if block.language not in SHELLS or block.not_run:
            continue
        line, joined = block.line, ""
        for offset, text in enumerate(block.code.splitlines()):
            if block.language == "console" and not joined and not text.startswith("$ "):
                continue  # what the command printed
            joined += text.removeprefix("$ ")
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            if joined.split("#")[0].strip():
                found.append(Command(page, line, " ".join(joined.split())))
            line, joined = block.line + offset + 1, ""
    return found
