"""All checks of doctor. Importing them registers them."""

from parallel3d.tools.doctor.checks import axes, environment, machine, network
