"""English for people: the only place that puts facts into words, for the command line, the API and web hooks alike. Pure.

Begin with ``base.py``. Nothing may look into what comes out of here: what a program needs to know is in the fact.
"""

from orchestrator.core.sentences import conditions, findings, jobs, machines, rank_ends
from orchestrator.core.sentences.base import advice, sentence
from orchestrator.core.sentences.failures import failure_advice, failure_sentence

__all__ = [
    "advice",
    "conditions",
    "failure_advice",
    "failure_sentence",
    "findings",
    "jobs",
    "machines",
    "rank_ends",
    "sentence",
]
