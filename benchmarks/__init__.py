"""Timings of layers, kernels and the service, and their dated results."""
