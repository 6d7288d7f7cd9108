"""A plan for a model: the one it brings, checked and completed, or one derived and proven."""
