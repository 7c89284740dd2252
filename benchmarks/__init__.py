"""Side-by-side measurements against peers. Each module runs alone: ``python -m benchmarks.NAME [--pairs N] [--json FILE]``."""
