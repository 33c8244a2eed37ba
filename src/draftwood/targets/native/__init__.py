"""The native target: our own decoder for Llama-family weights."""
