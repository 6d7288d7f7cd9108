"""audit: checks relations that must hold between trainings of one program, with any engine."""
