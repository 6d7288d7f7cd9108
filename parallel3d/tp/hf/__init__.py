"""The plan that a Hugging Face model brings, checked and completed."""
