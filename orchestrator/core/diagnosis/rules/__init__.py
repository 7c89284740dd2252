"""Rules that interpret a job's figures. Each is pure and returns suspicions with the figure that the definition uses."""
