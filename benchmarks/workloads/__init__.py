"""Training scripts that the benchmarks run and measure."""
