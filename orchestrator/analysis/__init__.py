"""Reports, plots, A/B comparison, time estimates."""
