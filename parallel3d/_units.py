"""Which modules of a model become units of the sharding engine."""

import dis
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.errors import Parallel3dError

__all__ = ["Units", "find_units", "of_one_unit"]


@dataclass(frozen=True)
class Units:
    """The units of a model, apart from the root.

    Attributes:
        blocks: (name, module) of the repeated blocks, in order.
        embeddings: (name, module) of token tables of their own, looked up before the blocks.
        tail: (name, module) of what comes after the blocks (final norm and head), one unit together.
    """

    blocks: list[tuple[str, nn.Module]]
    embeddings: list[tuple[str, nn.Module]]
    tail: list[tuple[str, nn.Module]]


def find_units(model: nn.Module, patterns: Sequence[str] | None = None) -> Units:
    """Finds the units; pure.

    Blocks are the members of the outermost ``nn.ModuleList`` s, of ``nn.ModuleDict`` s whose members are of
    one class, and numbered children of one class (``block0``, ``block1``, those of an ``nn.Sequential``) that
    have children themselves; or the modules whose names match ``patterns`` (shell wildcards within a dotted
    segment). A module that shares a parameter with
    another stays with the root, so that tied parameters are in one group. So does one whose weight the
    model reads without calling it.

    Raises:
        Parallel3dError: a pattern that matches nothing, or one match inside another.
    """
    blocks = _matching(model, patterns) if patterns is not None else _listed(model)
    inside = {id(m) for _, block in blocks for m in block.modules()}
    shared = _modules_with_shared_params(model)
    read = _weights_read_in_code(model)
    embeddings: list[tuple[str, nn.Module]] = []
    tail: list[tuple[str, nn.Module]] = []
    past_blocks = False
    for name, module in model.named_modules():
        if id(module) in inside:
            past_blocks = True
            continue
        if not name or id(module) in shared or not _has_own_params(module):
            continue
        if name.rpartition(".")[2] in read:
            continue
        if any(True for _ in module.children()):
            continue  # parameters beside submodules: the root's
        if past_blocks:
            tail.append((name, module))
        elif _is_plain_embedding(module):
            embeddings.append((name, module))
    return Units(blocks, embeddings, tail)


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether the module only looks rows up: then its backward doesn't read the table."""
    own_forward = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
    return isinstance(module, nn.Embedding) and own_forward


# What isn't part of a forward.
_SETTING_UP = ("__init__", "init", "_init", "reset", "tie", "_tie", "load", "_load", "post_init")


def _weights_read_in_code(model: nn.Module) -> set[str]:
    """Names of modules whose ``.weight`` the model's own classes read without calling the module, as
    ``self.positions.weight[:n]``: the hooks of a unit of its own would not see that."""
    found: set[str] = set()
    for cls in {type(module) for module in model.modules()}:
        if cls.__module__.startswith("torch."):
            continue
        for name, method in vars(cls).items():
            code = getattr(method, "__code__", None)
            if code is None or "weight" not in code.co_names or name.startswith(_SETTING_UP):
                continue
            steps = [(i.opname, i.argval) for i in dis.get_instructions(code)]
            found.update(
                owner[1]
                for owner, read in itertools.pairwise(steps)
                if owner[0] == read[0] == "LOAD_ATTR" and read[1] == "weight"
            )
    return found


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
    """The children of ``module`` that are repeated blocks."""
    weighty = [(n, child) for n, child in module.named_children() if _has_params(child)]
    if isinstance(module, nn.ModuleList):
        return weighty
    if isinstance(module, nn.ModuleDict):
        # Of several classes it is a namespace (wte, h, ln_f), as one with lists inside.
        alike = len({type(child) for _, child in weighty}) == 1 and len(weighty) > 1
        return weighty if alike and not any(map(_has_list, weighty)) else []
    numbered: dict[tuple[str, type], list[tuple[str, nn.Module]]] = {}
    for name, child in weighty:
        prefix = name.rstrip("0123456789")
        # fc1 and fc2 are layers of one block; a block has layers.
        if prefix != name and any(True for _ in child.children()):
            numbered.setdefault((prefix, type(child)), []).append((name, child))
    found = [item for items in numbered.values() if len(items) > 1 for item in items]
    # Stages that hold lists of blocks are too large: the lists' members are taken.
    return [] if any(map(_has_list, found)) else found


def _has_list(named: tuple[str, nn.Module]) -> bool:
    return any(isinstance(m, (nn.ModuleList, nn.ModuleDict)) for m in named[1].modules())


def _has_params(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    if isinstance(patterns, str):
        raise Parallel3dError(
            f"units is the string {patterns!r}; give a list of name patterns, such as [{patterns!r}]"
        )
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise Parallel3dError(
            f"units is {patterns!r}; it must be a list of name patterns, such as "
            '["layers.*"], or None'
        )
    named = [(name, module) for name, module in model.named_modules() if name]
    blocks: list[tuple[str, nn.Module]] = []
    known: set[int] = set()
    for pattern in patterns:
        matches = [(n, m) for n, m in named if _fits(n, pattern)]
        if not matches:
            nearest = ", ".join(n for n, _ in named[:8])
            raise Parallel3dError(
                f"units: the pattern {pattern!r} matches no module; there are {nearest}, ..."
            )
        blocks += [(name, module) for name, module in matches if id(module) not in known]
        known.update(id(module) for _, module in matches)
    names = {n for n, _ in blocks}
    for name, _ in blocks:
        around = itertools.accumulate(name.split("."), "{}.{}".format)
        outer = next((other for other in around if other in names and other != name), None)
        if outer is not None:
            raise Parallel3dError(
                f"units: {name} lies inside {outer}, which is a unit as well; "
                "match only one of the two levels"
            )
    return blocks


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _has_own_params(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _modules_with_shared_params(model: nn.Module) -> set[int]:
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(id(param), set()).add(id(module))
    return {module for modules in users.values() if len(modules) > 1 for module in modules}


_LARGE = 100_000_000
"""Parameters from which a model that is one unit is worth a word."""


def of_one_unit(model: nn.Module, units: Units) -> str:
    """What to say of a large model without blocks; ``""`` of others."""
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
