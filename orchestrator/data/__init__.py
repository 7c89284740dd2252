"""Files that the wheel carries: dashboards, alert rules, the schema of job.yaml and the digits example."""
