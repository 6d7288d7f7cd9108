"""Finds where a parallel model departs from the plain one: records both, compares, and names the module."""
