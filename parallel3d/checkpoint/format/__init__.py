"""What a checkpoint's folder holds, and how it is written and read: files, index, marker."""
