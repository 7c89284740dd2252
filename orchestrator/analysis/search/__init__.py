"""Searches over the parameters of a matrix, with Optuna: what to try next, which trials to end early, which are best."""
