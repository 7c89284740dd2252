"""``python -m tests.mutants.hunt N``: histories of the simulation until one fails; says which, and exits with 1."""

from __future__ import annotations

import sys

from tests.simulation import campaign


def main() -> int:
    """0 when the invariants held in all of them."""
    for seed in range(int(sys.argv[1])):
        outcome = campaign.run_history(campaign.history_of(seed))
        if outcome.failure:
            print(f"seed {seed}: {' '.join(outcome.failure.split())[:160]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
