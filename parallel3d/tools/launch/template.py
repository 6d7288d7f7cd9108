"""The one function that fills in a launch file's template."""

import re
from collections.abc import Mapping
from importlib.resources import files
from textwrap import indent

_VALUE = re.compile(r"\{\{([\w.]+)\}\}")


def fill(name: str, values: Mapping[str, object]) -> str:
    """Returns the template of this name with ``values`` in place of ``{{...}}``.

    A name with a dot is another template, filled in with the same values. Further lines of a value are
    indented as the line that it is in. Lines between ``%if value`` and ``%else`` or ``%end`` stay where the
    value is true; lines that begin with ``%#`` never do.

    Args:
        name: of a file in the folder ``templates``.
        values: name -> value, for all names in it.
    """
    text = files("parallel3d.tools.launch").joinpath("templates", name).read_text(encoding="utf-8")

    def value(found: re.Match[str]) -> str:
        name = found[1]
        return fill(name, values).rstrip("\n") if "." in name else str(values[name])

    lines: list[str] = []
    kept = [True]
    for line in text.splitlines():
        word, _, condition = line.partition(" ")
        if word == "%if":
            kept.append(kept[-1] and bool(values[condition]))
        elif word == "%else":
            kept[-1] = kept[-2] and not kept[-1]
        elif word == "%end":
            kept.pop()
        elif word != "%#" and kept[-1]:
            inner = line.lstrip()
            lines.append(indent(_VALUE.sub(value, inner), line.removesuffix(inner)))
    return "\n".join(lines) + "\n"
