"""``python -m tests.mutants.hunt N``: runs N histories of the simulation, or until one fails: then it exits with 1."""

from __future__ import annotations

import sys

from tests.simulation import campaign


def main() -> int:
    """Run the histories; return 0 if the invariants held in all of them, else 1."""
    for seed in range(int(sys.argv[1])):
        outcome = campaign.run_history(campaign.history_of(seed))
        if outcome.failure:
            print(f"seed {seed}: {' '.join(outcome.failure.split())[:160]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
