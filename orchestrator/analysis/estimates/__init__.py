"""Estimates of remaining time."""
