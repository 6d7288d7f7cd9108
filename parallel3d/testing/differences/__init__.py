"""Where a parallel model departs from the plain one: record both, fit parts to wholes, name the module."""
