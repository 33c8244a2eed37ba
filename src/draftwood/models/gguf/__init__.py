"""GGUF files: reading them, and turning them once into a folder in Hugging Face layout."""
