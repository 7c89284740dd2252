"""Boards, rules and alerts as code. Everything imports metric names from `orchestrator.catalogue` and from nowhere else."""
