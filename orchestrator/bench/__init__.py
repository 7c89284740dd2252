"""Single- against multi-GPU benchmark; the advisor's cost model."""
