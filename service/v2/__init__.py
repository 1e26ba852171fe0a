"""The Open Inference Protocol v2 with the binary tensor extension, as KServe's and Triton's clients speak it."""
