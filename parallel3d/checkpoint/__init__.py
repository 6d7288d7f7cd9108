"""Checkpoints: saved by all ranks, loaded on any mesh, exchanged with Hugging Face and torch."""

from parallel3d._lazy import export_lazily

__all__: list[str] = []

export_lazily(__name__, {})
