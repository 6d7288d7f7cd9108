"""What torch raises where a dry run can't go on, in words of the program."""

from __future__ import annotations

from parallel3d._compat_dry import VALUE_ERRORS
from parallel3d.dryrun.unknown import Unknown
from parallel3d.errors import DryRunError

__all__ = ["why_not"]

_NO_GPU = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "CUDA driver version is insufficient",  # of a build for CUDA, without a driver
    "no CUDA-capable device is detected",
    "Cannot access accelerator device when none is available",
    "torch.cuda.Stream requires CUDA support",
    "Tried to instantiate dummy base class",
    "Cannot get CUDA generator without ATen_cuda library",
)

_LIMITS = {
    "UninitializedParameter": "lazy modules, which learn their shapes from data, have no place in a dry run; "
    "give the layer its sizes",
    "FlexAttention does not support backward on CPU": "FlexAttention has no backward on the CPU, where dry "
    "runs are; use scaled_dot_product_attention where parallel3d.dryrun.active()",
}


def why_not(error: BaseException) -> str | None:
    """Why a dry run can't do what raised ``error``; None if it is the program's own fault."""
    if isinstance(error, DryRunError):
        return None
    text = str(error)
    if isinstance(error, VALUE_ERRORS):
        return (
            "an operation depends on tensors' values, which a dry run does not know "
            f"({type(error).__name__}: {text}); skip the lines with parallel3d.dryrun.active()"
        )
    if isinstance(error, ValueError) and text == "cannot convert float NaN to integer":
        return (
            "an int is made of NaN: float(tensor), which a dry run does not know; say what to take for it: "
            "parallel3d.dryrun.assume(float(tensor), default)"
        )
    if isinstance(error, TypeError) and Unknown.__name__ in text:
        return (
            "an argument of an operation is a number that a dry run does not know, as it comes from a tensor "
            f"({text}); say what to take for it: parallel3d.dryrun.assume(value, default)"
        )
    if any(each in text for each in _NO_GPU):
        return (
            f"the program needs a GPU here, and a dry run has none ({text.splitlines()[0]}); take the mesh's "
            "device, torch.device(mesh.device_type), or skip the lines with parallel3d.dryrun.active()"
        )
    if "its data is not allocated yet" in text or "Cannot access data pointer" in text:
        return (
            "an operation outside torch reads tensors' memory, which a dry run does not have "
            f"({text.splitlines()[0]}); skip the lines with parallel3d.dryrun.active()"
        )
    for part, reason in _LIMITS.items():
        if part in text:
            return f"{reason} ({text.splitlines()[0]})"
    return None
