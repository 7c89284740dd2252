"""English for users: the only package that puts facts into words, for the command line, the API and web hooks alike. Pure.

Begin with ``base.py``. No code may parse its output: what a program needs is in the fact.
"""

from orchestrator.core.sentences import conditions, findings, hangs, jobs, machines, rank_ends
from orchestrator.core.sentences.base import advice, sentence
from orchestrator.core.sentences.failures import failure_advice, failure_sentence

__all__ = [
    "advice",
    "conditions",
    "failure_advice",
    "failure_sentence",
    "findings",
    "hangs",
    "jobs",
    "machines",
    "rank_ends",
    "sentence",
]
