"""How patient tests are that run real processes."""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("SWARMTRAIN_TEST_PATIENCE", "1"))  # deadlines are multiplied by it; for busy machines
