"""Turns a submission's text into the events of its jobs. Begin with `checking.check`.

Must not write to the store: `daemon.requests.submissions` does.
"""
