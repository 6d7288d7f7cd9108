"""Writes docs/collectives.md: what a step communicates, beside torch's fully_shard."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"


def main() -> None:
    """Command line."""
    sys.path[:0] = [str(TESTS), str(TESTS / "fsdp")]
    from collective_cases import table

    (HERE / "collectives.md").write_text(table())


if __name__ == "__main__":
    main()
