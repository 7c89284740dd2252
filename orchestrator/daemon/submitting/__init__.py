"""From a submission's text to the events of its jobs. Begin with `checking.check`.

Must not write to the store: `daemon.requests.submissions` does.
"""
