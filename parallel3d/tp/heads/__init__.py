"""Whole heads for every rank: attention layers, and the numbers they keep."""
