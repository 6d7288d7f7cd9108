"""All checks: importing them registers them."""

from parallel3d.doctor.checks import axes, between, devices, environment, machine, network
