"""Which optimizer classes are known, and whether their step on an element depends on other elements."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

ELEMENTWISE = {
    "ASGD": "the step's size and the average's weight are functions of lr and the count of steps",
    "Adadelta": "two averages of squares, number by number, and their quotient",
    "Adagrad": "a sum of squares, number by number; the rate is a function of the count of steps",
    "Adam": "two averages, number by number; their corrections are functions of the count of steps",
    "AdamW": "as Adam; the decay multiplies each weight by itself",
    "Adamax": "an average and a decaying maximum, both over time, number by number",
    "NAdam": "as Adam; the product of momenta is a function of the count of steps",
    "RAdam": "as Adam; whether and how it rectifies is a function of the count of steps",
    "RMSprop": "an average of squares, of gradients (centered) and a momentum, number by number",
    "Rprop": "each number's own step size, by the signs of its last two gradients",
    "SGD": "a momentum, number by number",
}
"""Name in ``torch.optim`` -> why its step on an element depends on no other element."""

MATRIX = {
    "Adafactor": "means of rows and columns",
    "Muon": "orthogonal matrices",
}
"""Name in ``torch.optim`` -> what its step takes of a whole parameter; it looks at no other parameter."""

REFUSED = {
    "LBFGS": "it needs inner products over the whole model; use it on a plain model",
    "SparseAdam": "gradients of sharded parameters are dense; use Adam",
}
"""Name in ``torch.optim`` -> why it can't step on shards."""


BLOCKWISE = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
"""Names in ``torchao.optim``: elementwise but for states that are quantized in blocks."""


def is_known_blockwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether the class is one of torchao's in ``BLOCKWISE``; torchao is not imported."""
    name, module = optimizer_class.__name__, optimizer_class.__module__
    return name in BLOCKWISE and module.startswith("torchao.optim.")


def is_known_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether the class is one of torch's in ``ELEMENTWISE``, not a subclass: its step may do anything."""
    return any(optimizer_class is getattr(torch.optim, name) for name in ELEMENTWISE)


def base_among(table: Mapping[str, str], optimizer_class: type[Optimizer]) -> str | None:
    """Returns the name in ``table`` of a ``torch.optim`` class that the class is or derives from, or None."""
    return next((n for n in table if issubclass(optimizer_class, getattr(torch.optim, n))), None)


def step_of(optimizer_class: Any) -> Callable[..., Any]:
    """Returns the method ``step`` of the class without the hooks that torch wraps around it."""
    step = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
