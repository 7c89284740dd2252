"""How long jobs will still run, as they report, and how good that was in the end.

Begin with ``desk.py``; the arithmetic is ``core/estimates``'.
"""
