"""Repeated kills, stops, freezes and terminations of every process that a job depends on, singly and in pairs."""
