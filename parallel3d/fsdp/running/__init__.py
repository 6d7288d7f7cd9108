"""One run of a model: forward calls, the order of units, what is gathered ahead, what is still true."""
