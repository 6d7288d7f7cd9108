"""Deriving a plan for a model that brings none: trace it once, propose, and keep what is proven."""

from parallel3d.tp.derive.plan import derive_plan

__all__ = ["derive_plan"]
