"""Mixtures of experts, whose experts ep divides."""
