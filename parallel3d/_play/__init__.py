"""When the operations of a program run: the one clock of ``predict`` and of a dry run."""
