"""What torch writes, read without running any of it: DCP folders and files of ``torch.save``."""
