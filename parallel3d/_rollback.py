"""Putting a model back as it was when wrapping it fails half-way."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["unchanged_on_error"]


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Restores every module's class and attributes if the body raises.

    Parameters themselves are not copied: wrapping replaces them and never writes to them.
    """
    saved = [(module, type(module), _shallow(vars(module))) for module in model.modules()]
    attributes = [(param, dict(vars(param))) for param in model.parameters()]
    try:
        yield
    except BaseException:
        for module, cls, state in saved:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
        for param, values in attributes:
            vars(param).clear()
            vars(param).update(values)
        raise


def _shallow(state: dict[str, Any]) -> dict[str, Any]:
    """A copy one container deep: the dicts of parameters, buffers, modules and hooks are copied."""
    return {k: copy.copy(v) if isinstance(v, (dict, set, list)) else v for k, v in state.items()}
