"""How long jobs will still take."""
