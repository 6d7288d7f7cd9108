"""Collectives made fewer, or run beside computing."""
