"""All checks: importing them registers them."""

from parallel3d.tools.doctor.checks import axes, environment, machine, network
