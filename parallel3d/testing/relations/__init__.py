"""audit: relations that must hold between trainings of one program, on any engine."""
