"""What ``--model`` may be: a name, a config.json, shapes."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.planner.hf_config import spec_from_hf_config
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.shapes import spec_from_shapes

__all__ = ["read_model"]

_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def read_model(text: str | None, seq_len: int | None = None) -> ModelSpec:
    """The model that ``text`` names.

    Args:
        seq_len: rows of a table of learned positions, for shapes that don't say it.

    Raises:
        PlanningError: no such model, or shapes that can't be.
    """
    if not text:
        raise PlanningError(
            "which model? Give --model a name (llama-3.1-8b), a config.json or layers=32,hidden=4096,..."
        )
    if "=" in text:
        return _of_shapes(text, seq_len)
    return spec_from_hf_config(text)


def _of_shapes(text: str, seq_len: int | None) -> ModelSpec:
    known = inspect.signature(spec_from_shapes).parameters
    given: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise PlanningError(
                f"--model has {part!r}; shapes are name=value, the nearest: {', '.join(near)}"
            )
        given[name] = _value(name, value, known[name].annotation)
    needed = [n for n, p in known.items() if p.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in given]:
        raise PlanningError(f"--model lacks {', '.join(missing)}: shapes need {', '.join(needed)}")
    given.setdefault("seq_len", seq_len or 0)
    return spec_from_shapes(**given)


def _value(name: str, text: str, kind: str) -> int | bool | str:
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _FLAGS:
            raise PlanningError(f"--model has {name}={text}; it must be true or false")
        return _FLAGS[text.lower()]
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise PlanningError(f"--model has {name}={text}; it must be an int") from None
