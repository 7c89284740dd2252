"""Reports of ended jobs, written by separate processes."""
