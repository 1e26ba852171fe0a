"""What a mixture-of-experts layer with LoRA is, on any device."""
