"""How patient tests are that run real processes."""

from __future__ import annotations

import os

# Deadlines are multiplied by it. Only a failure waits for one: a busy machine must not look like a defect.
PATIENCE = float(os.environ.get("SWARMTRAIN_TEST_PATIENCE", "4"))
