"""Snapshot, commit, verify, retain, load."""
