"""Bootstrap (the one place that picks implementations), the loop, the executor."""
