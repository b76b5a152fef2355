"""Read by each Python process that starts with this folder in PYTHONPATH: arms it (../crash_points.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import crash_points

crash_points.install()
