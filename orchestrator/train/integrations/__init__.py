"""Integrations that run other libraries' training loops under orch: they report, save at a stop request, and resume.

Only the module of a library imports it: ``hf``, ``lightning``, ``accelerate``. Each also works without orch.
"""
