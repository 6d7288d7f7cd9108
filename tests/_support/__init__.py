"""What tests share."""

import os
import sys

# Written once, and not compiled (and asserts rewritten) again by each worker: half the time to collect.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
