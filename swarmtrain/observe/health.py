"""`python -m swarmtrain.observe.health`: the health check of a container. Exit code 0 if the daemon says it is well."""

from __future__ import annotations

import os
import sys
import urllib.request

DEFAULT_URL = "http://127.0.0.1:8080/healthz"


def main() -> int:
    """Ask once. $SWARMTRAIN_HEALTH_URL names another address."""
    url = os.environ.get("SWARMTRAIN_HEALTH_URL", DEFAULT_URL)
    try:
        with urllib.request.urlopen(url, timeout=4) as answer:
            print(answer.read(200).decode(errors="replace").strip())
    except (OSError, ValueError) as error:
        print(f"no answer from {url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
