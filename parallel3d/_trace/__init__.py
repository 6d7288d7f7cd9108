"""What a model runs, seen from outside: the kinds of operations, and the recorder of a forward."""
