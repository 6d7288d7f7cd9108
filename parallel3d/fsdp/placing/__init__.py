"""Where a parameter's parts are: the axes of the mesh, and the dims they cut."""
