"""Targets: the contract, the native decoder, the transformers adapter, and how models are found and loaded."""
