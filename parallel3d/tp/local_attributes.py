"""Numbers that a module keeps as attributes and that are others on a rank which holds a part of it.

``self.num_heads`` in a forward's ``view`` must say how many heads this rank has. Such an attribute is set
on the instance when a plan is applied; the model's code and its config stay what they are.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from parallel3d._layout.packing import pick_by_rank

# They run before or beside computing.
NOT_COMPUTING = {"__init__", "extra_repr", "reset_parameters", "_init_weights", "__repr__"}
_WIDTH = {
    "size",
    "dim",
    "width",
    "features",
    "channels",
    "embd",
    "embed",
    "hidden",
    "model",
    "inner",
}
# Sizes of something else, which may be the same number: Mistral's sliding_window is its width.
_NO_WIDTH = {
    "head",
    "heads",
    "vocab",
    "rope",
    "nope",
    "rotary",
    "window",
    "max",
    "position",
    "chunk",
}


@dataclass(frozen=True)
class PlannedAttribute:
    """An integer attribute of a module that differs from the plain model's.

    Attributes:
        module: the module's path.
        name: of the attribute.
        whole: its value in the plain model.
        values: [tp rank] -> its value there.
    """

    module: str
    name: str
    whole: int
    values: tuple[int, ...]

    def set(self, module: nn.Module, rank: int) -> None:
        """Gives ``module`` its value on ``rank``; under simulated ranks that differ, a ``SymInt``."""
        alike = len(set(self.values)) == 1
        setattr(module, self.name, self.values[0] if alike else pick_by_rank(self.values, rank))


def local_attributes(
    path: str, module: nn.Module, values: Mapping[str, tuple[int, ...]]
) -> list[PlannedAttribute]:
    """The plan to set attributes of ``module``, which lies at ``path``.

    Args:
        values: name -> its value on each tp rank. Attributes the module doesn't have as an ``int`` of its
            own are left out, and so are those that are alike on all ranks and in the plain model.
    """
    planned = []
    for name, by_rank in values.items():
        whole = vars(module).get(name)
        if type(whole) is int and set(by_rank) != {whole}:
            planned.append(PlannedAttribute(path, name, whole, tuple(by_rank)))
    return planned


def width_attributes(module: nn.Module, width: int) -> list[str]:
    """The module's own attributes that hold ``width``, are named like a width, and are read in computing."""
    reads = reads_of(module)
    return [
        name
        for name, value in vars(module).items()
        if type(value) is int
        and value == width
        and _is_width(name)
        and (reads is None or name in reads)
    ]


def _is_width(name: str) -> bool:
    words = set(name.split("_"))
    return name == "all_head_size" or bool(words & _WIDTH and not words & _NO_WIDTH)


def describe_attributes(attributes: Sequence[PlannedAttribute]) -> Iterator[str]:
    """One line for each group that differs in nothing but a layer's number."""
    groups: dict[tuple[str, int, tuple[int, ...]], list[str]] = {}
    for a in attributes:
        name = re.sub(r"\b\d+\b", "*", f"{a.module}.{a.name}".lstrip("."))
        groups.setdefault((name, a.whole, a.values), []).append(a.module)
    for (name, whole, values), modules in groups.items():
        local = values[0] if len(set(values)) == 1 else f"{', '.join(map(str, values))} by rank"
        yield f"{name} {whole} -> {local}" + (f" (x{len(modules)})" if len(modules) > 1 else "")


def reads_of(module: nn.Module) -> frozenset[str] | None:
    """What the module's methods read of ``self`` while it computes: ``"num_heads"``, ``"config.n_head"``.

    Read off the source of its class and its bases, without ``__init__``. None where there is no source.
    """
    return _reads_of_class(type(module))  # type: ignore[arg-type]  # a class has a hash


@functools.cache
def _reads_of_class(cls: type) -> frozenset[str] | None:
    found: set[str] = set()
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if name in NOT_COMPUTING or not inspect.isfunction(function):
                continue
            try:
                source = textwrap.dedent(inspect.getsource(function))
                found.update(_reads(ast.parse(source)))
            except (OSError, TypeError, SyntaxError):
                return None
    return frozenset(found)


def _reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                yield node.attr
            elif (
                isinstance(owner, ast.Attribute)
                and isinstance(owner.value, ast.Name)
                and owner.value.id == "self"
            ):
                yield f"{owner.attr}.{node.attr}"
