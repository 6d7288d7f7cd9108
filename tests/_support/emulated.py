"""``benchmarks/emulated_network.py`` for tests: one process as one rank of many, on a network of its own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from emulated_network import (
    CudaLine,
    EmulatedGroup,
    EmulatedNetwork,
    Link,
    Transfer,
    VirtualClock,
)

__all__ = ["CudaLine", "EmulatedGroup", "EmulatedNetwork", "Link", "Transfer", "VirtualClock"]
