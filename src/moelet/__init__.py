"""Serve mixture-of-experts layers with hot-swappable LoRA adapters from one GPU (or CPU), over HTTP."""

__version__ = "0.1.0"
