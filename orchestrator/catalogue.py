"""One table of every metric: name, labels, unit, help. Imports nothing."""
