"""``python -m parallel3d.cli``: the command without its script."""

from parallel3d.cli import main

main()
