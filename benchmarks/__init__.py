"""What is measured, and how: every number that this project states about speed or memory comes from here."""

from __future__ import annotations

import sys
from pathlib import Path

# Ranks are started as the tests start theirs: by fork, with a timeout, and with tracebacks that name their rank.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
