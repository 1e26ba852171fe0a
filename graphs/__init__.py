"""All Python that speaks to the GPU: driver calls, compilation, buffers, capture and replay."""
