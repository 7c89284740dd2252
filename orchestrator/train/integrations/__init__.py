"""Other libraries' training loops under orch: they report, save when asked to stop, and go on where they stopped.

One module for each library, which alone imports it: ``hf``, ``lightning``, ``accelerate``. Each works as well without orch.
"""
