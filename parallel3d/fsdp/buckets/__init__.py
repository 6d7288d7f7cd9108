"""Buckets: parameters communicated together, their buffers, and their gradients on the way to ``.grad``."""
