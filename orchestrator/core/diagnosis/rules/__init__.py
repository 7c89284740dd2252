"""Rules: what the figures of a job may mean. Each is pure and names a suspicion with the figure that its definition judges."""
