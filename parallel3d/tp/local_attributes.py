"""Int attributes of modules, such as numbers of heads, whose value on a rank differs from the plain model's.

``self.num_heads`` in a forward's ``view`` must be the number of this rank's heads. Such an attribute is set
on the instance when a plan is applied; the model's code and its config stay unchanged.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from parallel3d._layout.packing import pick_by_rank
from parallel3d._util.users_code import syntax_of

# Methods that don't run in a forward.
NOT_COMPUTING = {"__init__", "extra_repr", "reset_parameters", "_init_weights", "__repr__"}
_WIDTH = re.compile("size|dim|width|features|channels|embd|embed|hidden|model|inner")
# Sizes of something else, which may be the same number: Mistral's sliding_window is its width.
_NO_WIDTH = re.compile("heads?|vocab|rope|nope|rotary|window|max|position|chunk")


@dataclass(frozen=True)
class PlannedAttribute:
    """An integer attribute of a module that differs from the plain model's.

    Attributes:
        module: the module's path.
        name: the attribute.
        whole: its value in the plain model.
        values: its value on each tp rank.
    """

    module: str
    name: str
    whole: int
    values: tuple[int, ...]

    def set(self, module: nn.Module, rank: int) -> None:
        """Sets the attribute of ``module`` to its value on ``rank``, a ``SymInt`` under simulated ranks."""
        alike = len(set(self.values)) == 1
        setattr(module, self.name, self.values[0] if alike else pick_by_rank(self.values, rank))


def local_attributes(
    path: str, module: nn.Module, values: Mapping[str, tuple[int, ...]]
) -> list[PlannedAttribute]:
    """Returns the attributes of ``module``, at ``path`` in the model, that change under tensor parallelism.

    Args:
        values: name -> its value on each tp rank; names that are no ``int`` of the module, or keep their
            value, are left out.
    """
    planned = []
    for name, by_rank in values.items():
        whole = vars(module).get(name)
        if type(whole) is int and set(by_rank) != {whole}:
            planned.append(PlannedAttribute(path, name, whole, tuple(by_rank)))
    return planned


def width_attributes(module: nn.Module, width: int) -> list[str]:
    """Returns the names of the module's int attributes that equal ``width``, a number of features, have a
    name such as ``hidden_size``, and are read in its forward."""
    reads = reads_of(module)

    def is_width(name: str) -> bool:
        words = name.split("_")
        named = any(map(_WIDTH.fullmatch, words)) and not any(map(_NO_WIDTH.fullmatch, words))
        return (named or name == "all_head_size") and (reads is None or name in reads)

    return [n for n, v in vars(module).items() if type(v) is int and v == width and is_width(n)]


def describe_attributes(attributes: Sequence[PlannedAttribute]) -> Iterator[str]:
    """Yields lines for the plan's table, such as ``layers.*.attn.num_heads 32 -> 8 (x12)``; the layers share
    one line."""
    groups: dict[tuple[str, int, tuple[int, ...]], list[str]] = {}
    for a in attributes:
        name = re.sub(r"\b\d+\b", "*", f"{a.module}.{a.name}".lstrip("."))
        groups.setdefault((name, a.whole, a.values), []).append(a.module)
    for (name, whole, values), modules in groups.items():
        local = values[0] if len(set(values)) == 1 else f"{', '.join(map(str, values))} by rank"
        yield f"{name} {whole} -> {local}" + (f" (x{len(modules)})" if len(modules) > 1 else "")


def reads_of(module: nn.Module) -> frozenset[str] | None:
    """Returns the attributes of ``self`` that the source of the module's class and its bases reads outside of
    ``__init__``: ``"num_heads"``, ``"config.n_head"``. None if the source can't be read."""
    return _reads_of_class(type(module))  # type: ignore[arg-type]  # a class has a hash


@functools.cache
def _reads_of_class(cls: type) -> frozenset[str] | None:
    found: set[str] = set()
    for base in cls.__mro__:
        trees = [] if base in (nn.Module, object) else method_trees(base)
        if trees is None:
            return None
        found.update(name for tree in trees for name in _reads(tree))
    return frozenset(found)


def method_trees(cls: type) -> list[ast.Module] | None:
    """Returns the syntax trees of the methods that ``cls`` itself defines, without those such as ``__init__``
    that don't run in a forward; None if a source can't be read."""
    own = (getattr(m, "__func__", m) for n, m in vars(cls).items() if n not in NOT_COMPUTING)
    trees = [syntax_of(f) for f in map(inspect.unwrap, own) if inspect.isfunction(f)]
    return None if None in trees else trees  # type: ignore[return-value]


def _reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.Attribute(
                value=ast.Attribute(value=ast.Name(id="self"), attr=owner), attr=name
            ):
                yield f"{owner}.{name}"
