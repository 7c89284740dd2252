"""Samples from NVML, amdgpu, Intel and simulation; balance; recorder; the exporter as a plain object."""
