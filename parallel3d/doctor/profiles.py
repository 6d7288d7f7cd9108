"""Which of the planner's profiles is of a device that torch names; none rather than a similar one."""

from __future__ import annotations

from parallel3d.planner.cluster import gpus

__all__ = ["profile_of"]

_FORMS = ("pcie", "nvl", "sxm")


def profile_of(device: str, gib: float) -> str | None:
    """The profile's name.

    Args:
        device: as torch names it: ``NVIDIA A100-SXM4-80GB``, ``NVIDIA H100 PCIe``.
        gib: of its memory: there are several with one name.
    """
    words = device.lower().replace("-", " ").split()
    form = next((f for f in _FORMS if any(word.startswith(f) for word in words)), "sxm")
    fitting = [
        each
        for each in {gpu.name: gpu for gpu in gpus().values()}.values()
        if each.family in words and (form in each.name or not any(f in each.name for f in _FORMS))
    ]
    near = [each for each in fitting if abs(each.capacity_gib - gib) < 0.1 * gib]
    return min(near, key=lambda each: abs(each.capacity_gib - gib)).name if near else None
