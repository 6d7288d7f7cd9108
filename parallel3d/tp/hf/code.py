"""Whose code a module runs: its family's, which the plan was written for, or somebody else's.

A plan says of a family's modules what is split, and is right only with the family's code between them. A
subclass with a forward of its own, a patched forward, a hook, or an attention function that was registered
may mix heads or features that ranks have shared out, and no rule shows it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from parallel3d.tp.heads.local_attributes import NOT_COMPUTING, reads_of

__all__ = ["OwnCode", "plan_packages"]


def plan_packages(model: nn.Module) -> frozenset[str]:
    """The packages that the plans of ``model`` and of the models inside it come from."""
    found = set()
    for module in model.modules():
        for owner, name in (
            (module, "_tp_plan"),
            (getattr(module, "config", None), "base_model_tp_plan"),
        ):
            for cls in type(owner).__mro__:
                plan = vars(cls).get(name)
                if isinstance(plan, Mapping) and plan:
                    found.add(_package(cls.__module__))
    return frozenset(found)


class OwnCode:
    """Tells code that a plan was not written for.

    Args:
        packages: that plans come from, as :func:`plan_packages` finds them.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages | {"torch", "parallel3d", *sys.stdlib_module_names} - {"__main__"}
        self._classes: dict[type, bool] = {}

    def runs_in(self, module: nn.Module) -> bool:
        """Whether what ``module`` computes is, or may be, code of other packages."""
        patched = vars(module).get("forward")
        if patched is not None and self._is(patched):
            return True
        cls = type(module)
        if cls not in self._classes:
            self._classes[cls] = any(map(self._is, _methods(cls)))
        return self._classes[cls] or self._attends_by(module)

    def hooks_of(self, module: nn.Module) -> bool:
        """Whether a hook of other packages may change what ``module`` is given or gives."""
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return any(map(self._is, hooks))

    def _attends_by(self, module: nn.Module) -> bool:
        """Whether the attention function that the module's config names is such code."""
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if "config._attn_implementation" not in (reads_of(module) or ()):
            return False
        known = getattr(
            sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {}
        )
        return name in known and self._is(known[name])

    def _is(self, function: Any) -> bool:
        return any(_package(f) not in self._packages for f in _modules_of(function))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _methods(cls: type) -> Iterator[Callable[..., Any]]:
    for base in cls.__mro__:
        if base not in (nn.Module, object):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if (
                    name not in NOT_COMPUTING
                    and callable(function)
                    and not isinstance(function, type)
                ):
                    yield function


def _modules_of(function: Any) -> Iterator[str]:
    """Where a function and all that it wraps were written; ``functools.wraps`` copies ``__module__``."""
    while function is not None:
        function = getattr(function, "__func__", function)
        scope = getattr(function, "__globals__", None)
        yield str((scope or {}).get("__name__") or type(function).__module__)
        function = getattr(function, "__wrapped__", getattr(function, "func", None))
