"""Searches over a matrix: submits the trials of `strategy: optuna` one after the other, and ends those that do badly."""
