"""Models in Hugging Face's form: read and written by all ranks, each its own part."""
