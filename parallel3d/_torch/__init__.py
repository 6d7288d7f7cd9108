"""Every private name of torch that the library uses, by subject.

For torch 2.11 to 2.15: ``python docs/versions.py`` runs the tests on each.
"""
