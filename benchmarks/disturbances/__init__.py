"""Kills, stops, freezes and terminations of everything that a job stands on, singly and in pairs, again and again."""
