"""Where a parallel model departs from the plain one: recording both, fitting parts to wholes, naming the module."""
