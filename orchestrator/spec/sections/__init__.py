"""Sections of job.yaml that `model` is made of, each a module of its own. Must not import `model`, which re-exports them."""
