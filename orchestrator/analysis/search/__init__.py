"""Searches over the parameters of a matrix, with Optuna: the next values to try, the trials to end early, the best trials."""
