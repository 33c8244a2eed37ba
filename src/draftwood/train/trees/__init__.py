"""Trees that hang off the positions of training texts: grown by the target or by a head, followed, and judged."""
