"""Simulates the queue: discrete events through the daemon's own scheduler. Pure.

Begin with ``engine.py``. It decides nothing itself: ``scheduler`` decides placement, waiting and preemption.
"""
