"""Models and trainings for the tests of audits."""
