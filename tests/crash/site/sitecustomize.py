"""Read by each Python process that starts with this folder in PYTHONPATH: arms it (../points.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from crash import points

points.install()
