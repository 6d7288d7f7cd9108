"""Restoring a model when wrapping it fails."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from parallel3d._util.forwards import set_class

# Attributes in which torch keeps parameters, buffers, modules and hooks.
_CONTAINERS = tuple(k for k, v in vars(nn.Module()).items() if isinstance(v, (dict, set)))


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Restores every module's class and attributes if the body raises.

    Parameters are not copied: wrapping replaces them and never writes to them. Containers are refilled, not
    replaced, since the handle of a user's hook refers to its container.
    """
    modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
    containers = [
        (container, container.copy() if container else ())  # most of a module's are empty
        for _, _, state in modules
        for container in (state[name] for name in _CONTAINERS if name in state)
    ]
    attributes = [(param, dict(vars(param))) for param in model.parameters()]
    try:
        yield
    except BaseException:
        for module, cls, state in modules:
            set_class(module, cls)
            vars(module).clear()
            vars(module).update(state)
        for container, content in containers:
            container.clear()
            container.update(content)
        for param, values in attributes:
            vars(param).clear()
            vars(param).update(values)
        raise
