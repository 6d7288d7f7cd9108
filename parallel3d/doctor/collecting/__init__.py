"""What is read from the machine, the environment and torch to make Facts."""
