"""The daemon is killed at eight random moments while users submit, pause, resume and cancel; ``make soak`` does it 1000 times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.campaign import Campaign, kill_daemon_at_random
from tests.support.ledger import Ledger
from tests.support.stack import Stack

pytestmark = pytest.mark.rare

KILLS = 8


@pytest.mark.slow
def test_no_kill_of_the_daemon_loses_repeats_or_leaves_anything(
    breakable: Stack, ledger: Ledger, tmp_path: Path, dice: random.Random
) -> None:
    campaign = Campaign(stack=breakable, ledger=ledger, directory=tmp_path, dice=dice, drivers=3, steps=80)
    breakable.kill_daemon()
    with campaign:
        try:
            seen = kill_daemon_at_random(campaign, KILLS, starting=1.2, ready=0.3)
        finally:
            breakable.up()
    campaign.verify()
    print(f"{len(campaign.outcomes)} jobs; states at the kills: {seen}")
    assert len(campaign.outcomes) >= 3, "there was something to lose"
