"""Whole tensors: gathering them, state dicts in every form, ``chunk`` and ``gather``."""
