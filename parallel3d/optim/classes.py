"""Optimizer classes: those known to be elementwise, each with its reason; and their step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["ELEMENTWISE", "is_known_elementwise", "step_of"]

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
"""Name in ``torch.optim`` -> why what it does to a number depends on no other number.

Not among them: Muon (orthogonal matrices), Adafactor (rows' and columns' means), LBFGS
(inner products) and SparseAdam.
"""


def is_known_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is one of ``ELEMENTWISE`` itself: a subclass may do anything in its step."""
    return any(optimizer_class is getattr(torch.optim, name, None) for name in ELEMENTWISE)


def step_of(optimizer_class: Any) -> Callable[..., Any]:
    """Its ``step`` without the hooks that torch has put around it."""
    step = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
