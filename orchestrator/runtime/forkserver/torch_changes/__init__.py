"""Functions of torch and of `pdb` that are replaced in forked training processes: what each replacement adds, and why.

Begin with teardown.py. A module here may import torch's modules, but must not change what a script can observe of them.
"""
