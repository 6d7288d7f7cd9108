"""``benchmarks/planner_runs.py``, which is no part of the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from planner_runs import (
    COLUMNS,
    Models,
    predict_run,
    predict_runs,
    read_models,
    stack_of_run,
    write_predictions,
)

__all__ = [
    "COLUMNS",
    "Models",
    "predict_run",
    "predict_runs",
    "read_models",
    "stack_of_run",
    "write_predictions",
]
