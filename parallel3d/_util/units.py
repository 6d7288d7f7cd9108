"""The units of a model: which modules ``parallelize`` shards one by one, found in its structure and code."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from parallel3d._util.users_code import syntax_of
from parallel3d.errors import Parallel3dError


class Units(NamedTuple):
    """The units of a model by name; the root is not among them."""

    blocks: list[tuple[str, nn.Module]]  # the repeated ones, in order; none is inside another
    inner: list[tuple[str, nn.Module]]  # the units inside blocks, the innermost first
    embeddings: list[tuple[str, nn.Module]]  # of tokens, before the blocks; they share no parameter
    final_norm_and_head: list[
        tuple[str, nn.Module]
    ]  # what comes after the blocks; one unit together

    @property
    def modules(self) -> list[list[nn.Module]]:
        """The modules of each unit, as ``fully_shard`` takes them."""
        alone = [[module] for _, module in (*self.inner, *self.blocks, *self.embeddings)]
        return [*alone, [module for _, module in self.final_norm_and_head]]

    def with_inner(self, modules: Mapping[str, tuple[nn.Module, Any]]) -> Units:
        """Returns these units with ``modules``, {name: (module, ...)}, as inner units, too. Those that lie in
        the root's head are removed from it."""
        known = {id(module) for _, module in self.inner}
        more = [(name, each[0]) for name, each in modules.items() if id(each[0]) not in known]
        inner = sorted([*self.inner, *more], key=lambda each: -each[0].count("."))
        own = {id(module) for each in modules.values() for module in each[0].modules()}
        final = [each for each in self.final_norm_and_head if id(each[1]) not in own]
        return self._replace(inner=inner, final_norm_and_head=final)


def find_units(model: nn.Module, patterns: Sequence[str] | None = None) -> Units:
    """Returns the units of ``model``, which is not changed.

    Blocks are, unless ``patterns`` are given: the members of the outermost ``nn.ModuleList`` s (of a list of
    lists the inner lists' members, without norms), of ``nn.ModuleDict`` s whose members are of one class, and
    numbered children of one class (``block0``, ``block1``, those of an ``nn.Sequential``) that have children
    themselves. With ``patterns`` (shell wildcards within a dotted segment) blocks are the outermost modules
    whose names match; other matches are units inside the blocks. A module inside a block that the model calls
    without the block is a unit, too. The root keeps a module that shares a parameter with another, so that
    tied parameters are in one group; one whose weight other code reads without calling it; and what a pattern
    ``"!embed"`` names.
    """
    chosen, left = _chosen(patterns)
    matched = _listed(model) if chosen is None else _matching(model, chosen)
    to_root = {id(m) for _, module in _matching(model, left, True) for m in module.modules()}
    matched = [(name, module) for name, module in matched if id(module) not in to_root]
    within = {id(m) for _, module in matched for m in module.modules() if m is not module}
    blocks = [(name, module) for name, module in matched if id(module) not in within]
    inner = [(name, module) for name, module in matched if id(module) in within]
    inner += [each for each in _called_inside(model, blocks) if each not in inner]
    inner.sort(key=lambda each: -each[0].count("."))
    inside = {id(m) for _, block in blocks for m in block.modules()}
    for lists in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        members = {id(m) for m in lists.modules()}
        inside |= members if not members.isdisjoint(inside) else set()
    users = Counter(param for m in model.modules() for param in {*m._parameters.values()})
    read = _read_without_call(model)
    embeddings: list[tuple[str, nn.Module]] = []
    final: list[tuple[str, nn.Module]] = []
    past_blocks = False
    for name, module in model.named_modules():
        if id(module) in inside:
            past_blocks = True
            continue
        own = [param for param in module._parameters.values() if param is not None]
        is_shared = any(users[param] > 1 for param in own)
        # Parameters beside submodules are the root's.
        if not name or not own or any(True for _ in module.children()) or is_shared:
            continue
        if id(module) in read | to_root:
            continue
        if past_blocks:
            final.append((name, module))
        elif isinstance(module, nn.Embedding) and (
            type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
        ):  # it only looks rows up: its backward doesn't read the weight
            embeddings.append((name, module))
    return Units(blocks, inner, embeddings, final)


# Prefixes of methods that are not part of a forward; functions that they define may be.
_SETTING_UP = ("__init__", "init", "_init", "reset", "tie", "_tie", "load", "_load", "post_init")


def _read_without_call(model: nn.Module) -> set[int]:
    """Returns the ids of modules whose ``.weight`` the model's own code reads without calling them.

    An example is ``self.positions.weight[:n]``: if the module were a unit, its hooks would not run. They are
    found by the attributes that hold them, of modules and of plain objects that modules hold (a tied head
    that is no module), in the code of those classes and of the functions among these objects.
    """
    names: dict[int, set[str]] = {}  # id of a module -> the attributes that hold it
    code: dict[Any, None] = {}  # classes and functions
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(module, 0) for module in model.modules()]
    for owner, depth in waiting:
        if id(owner) in seen or depth > _DEPTH:
            continue
        seen.add(id(owner))
        code.update(dict.fromkeys([owner] if inspect.isfunction(owner) else type(owner).__mro__))
        for name, held in _held_by(owner):
            if isinstance(held, nn.Module):
                names.setdefault(id(held), set()).add(name)
            else:
                waiting.append((held, depth + 1))
    trees = (tree for each in code for tree in _functions_of(each, {"weight"}))
    read = {name for tree in trees for name in _weights_read(tree)}
    return {key for key, own in names.items() if not own.isdisjoint(read)}


_DEPTH = 3
"""How many objects lie one in another at most: a partial of a method of an object that holds a module."""
_BARE = nn.Module()


def _held_by(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, object) of the modules, plain objects and functions that ``owner`` refers to."""
    held: dict[Any, Any] = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):
        held = {n: v for n, v in held.items() if n not in vars(_BARE)} | owner._modules
    elif inspect.isfunction(owner):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        with suppress(ValueError):  # a cell without a value yet
            held |= {name: cell.cell_contents for name, cell in cells}
    elif inspect.ismethod(owner):
        held = {"": owner.__self__, "method": owner.__func__}
    elif isinstance(owner, functools.partial):
        held = {**owner.keywords, "": owner.func} | {str(i): v for i, v in enumerate(owner.args)}
    for name, value in held.items():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            plain = hasattr(each, "__dict__") and not isinstance(each, (type, types.ModuleType))
            package = type(each).__module__.partition(".")[0]
            if isinstance(
                each, (nn.Module, types.FunctionType, types.MethodType, functools.partial)
            ) or (plain and (package == "__main__" or package not in _NO_MODELS)):
                yield str(name), each


_NO_MODELS = {"torch", "numpy", *sys.stdlib_module_names}


def _weights_read(function: ast.AST) -> Iterator[str]:
    """Yields the name ``n`` for each expression ``x.n.weight``, or ``v.weight`` after ``v = x.n``."""
    variables: dict[str, str] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=ast.Attribute(attr=name)):
                variables[variable] = name
    for node in ast.walk(function):
        match node:
            case ast.Attribute(attr="weight", value=read):
                while isinstance(read, ast.Subscript):  # of a list that hides a module
                    read = read.value
                if isinstance(read, ast.Name):
                    yield variables.get(read.id, read.id)
                elif isinstance(read, ast.Attribute):
                    yield read.attr


def _called_inside(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of modules inside ``blocks`` that code outside calls without calling the block.

    An example is ``self.blocks[0].embed(t)``: the hooks of ``blocks[0]`` don't run, so ``embed`` must be a
    unit. Calls through other variables than ``self`` are not seen.
    """
    ids = {id(block) for _, block in blocks}
    inside = {id(m) for _, block in blocks for m in block.modules()} - ids
    found: set[int] = set()
    for owner in model.modules():
        if id(owner) in inside | ids:
            continue
        for cls in type(owner).__mro__:
            for node in chain.from_iterable(map(ast.walk, _functions_of(cls, owner._modules))):
                called = _module_at(node.func, owner) if isinstance(node, ast.Call) else None
                if called is not None and next(called.parameters(), None) is not None:
                    found.add(id(called))
    return [(name, m) for name, m in model.named_modules() if id(m) in found & inside]


def _module_at(node: ast.expr, owner: nn.Module) -> nn.Module | None:
    """Returns the module that ``node``, such as ``self.blocks[0].norm``, refers to if self is ``owner``."""
    if isinstance(node, ast.Name):
        return owner if node.id == "self" else None
    around = (
        _module_at(node.value, owner) if isinstance(node, (ast.Attribute, ast.Subscript)) else None
    )
    if around is None:
        return None
    if isinstance(node, ast.Attribute):
        return around._modules.get(node.attr)
    try:
        found = around[ast.literal_eval(node.slice)]  # type: ignore[index, attr-defined]
    except (ValueError, TypeError, KeyError, IndexError):  # no literal, or no module there
        return None
    return found if isinstance(found, nn.Module) else None


def _functions_of(owner: Any, names: Collection[str]) -> Iterator[ast.AST]:
    """Yields the syntax trees of a function, or of a class's own methods, that use one of ``names``; torch's
    are skipped. Of methods that initialise the model, only functions defined in them are yielded."""
    if owner.__module__.partition(".")[0] in _NO_MODELS - {"__main__"}:
        return
    members = vars(owner).items() if isinstance(owner, type) else [("", owner)]
    for name, member in members:
        method = inspect.unwrap(getattr(member, "fget", None) or member)
        if not inspect.isfunction(method) or not _uses(method.__code__, names):
            continue
        tree = syntax_of(method)
        if tree is not None and name.startswith(_SETTING_UP):
            (defined,) = tree.body
            yield from (n for n in ast.walk(tree) if isinstance(n, _DEFINES) and n is not defined)
        elif tree is not None:
            yield tree


_DEFINES = (ast.FunctionDef, ast.Lambda)


def _uses(code: types.CodeType, names: Collection[str]) -> bool:
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not set(names).isdisjoint(code.co_names) or any(_uses(c, names) for c in nested)


def _listed(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks: list[tuple[str, nn.Module]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        for child_name, child in _repeated(module):
            if id(child) not in inside:
                blocks.append((f"{name}.{child_name}" if name else child_name, child))
                inside.update(id(m) for m in child.modules())
        if isinstance(module, nn.ModuleList):
            inside.update(id(m) for m in module.modules())
    return blocks


def _repeated(module: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(module, nn.ModuleList):
        return list(_members(module))
    named = module.named_children()
    children = [(n, child) for n, child in named if next(child.parameters(), None) is not None]
    found: list[tuple[str, nn.Module]] = []
    if isinstance(module, nn.ModuleDict):
        # With several classes it is a namespace (wte, h, ln_f).
        if len({type(child) for _, child in children}) == 1 and len(children) > 1:
            found = children
    else:
        numbered: dict[tuple[str, type], list[tuple[str, nn.Module]]] = {}
        for name, child in children:
            prefix = name.rstrip("0123456789")
            # fc1 and fc2 are layers of one block; a block has layers.
            if prefix != name and any(True for _ in child.children()):
                numbered.setdefault((prefix, type(child)), []).append((name, child))
        found = [item for items in numbered.values() if len(items) > 1 for item in items]
    # Children that hold lists of blocks are too large: the lists' members are the blocks.
    lists = (nn.ModuleList, nn.ModuleDict)
    return [] if any(isinstance(m, lists) for _, child in found for m in child.modules()) else found


def _members(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the blocks of an ``nn.ModuleList``: its members with parameters; for lists in it, which are
    never called, their members except norms, as a unit for a few numbers would cost a collective."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not _has_forward(child):
            for inner, each in _members(child):
                if any(p.dim() > 1 for p in each.parameters()):
                    yield f"{name}.{inner}", each
        elif next(child.parameters(), None) is not None and not isinstance(child, _NO_FORWARD):
            yield name, child


_NO_FORWARD = (nn.ParameterList, nn.ParameterDict)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _chosen(patterns: Sequence[str] | None) -> tuple[list[str] | None, list[str]]:
    """Returns (patterns of blocks, None for the default ones; patterns of what stays with the root)."""
    if patterns is None:
        return None, []
    is_list = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise Parallel3dError(
            f"units is {patterns!r}; it must be a list of name patterns, such as ['layers.*'], or None"
        )
    left = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    chosen = [pattern for pattern in patterns if not pattern.startswith("!")]
    return (None if left and not chosen else chosen), left


def _matching(
    model: nn.Module, patterns: Sequence[str], for_root: bool = False
) -> list[tuple[str, nn.Module]]:
    named = [(name, module) for name, module in model.named_modules() if name]
    blocks: list[tuple[str, nn.Module]] = []
    known: set[int] = set()
    for pattern in patterns:
        matches = [(n, m) for n, m in named if _matches(n, pattern)]
        if not matches:
            nearest = ", ".join(n for n, _ in named[:8])
            raise Parallel3dError(
                f"units: the pattern {'!' * for_root + pattern!r} matches no module; there are {nearest}, ..."
            )
        for name, module in matches:
            lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if lists and not _has_forward(module) and not for_root:
                raise Parallel3dError(
                    f"units: the pattern {pattern!r} matches {name!r}, an nn.{type(module).__name__}, which "
                    f"has no forward to hook; give its members, {name + '.*'!r}"
                )
        blocks += [(name, module) for name, module in matches if id(module) not in known]
        known.update(id(module) for _, module in matches)
    return blocks


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


_LARGE = 100_000_000
"""Number of parameters above which a model that is one unit gets a warning."""


def of_one_unit(model: nn.Module, units: Units) -> str:
    """Returns a warning if a large model has no blocks, so that all of it is one unit; else ``""``."""
    count = sum(p.numel() for p in model.parameters())
    if units.blocks or count <= _LARGE:
        return ""
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in model.named_modules() if n}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} M)" for name in largest)
    return (
        f"{type(model).__name__}, of {count / 1e6:.0f} M parameters, is one unit: it has no repeated blocks "
        "that could be found, so all of it is gathered at once and nothing overlaps. Name the blocks to "
        "shard one by one: "
        f'parallelize(..., units=["{largest[0] if largest else "blocks"}.*"]). The largest modules: {named}'
    )
