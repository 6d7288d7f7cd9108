"""``python -m parallel3d``: the command without its script."""

from parallel3d.tools.cli import main

main()
