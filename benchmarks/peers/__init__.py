"""Programs for the peers, as their users would write them."""
