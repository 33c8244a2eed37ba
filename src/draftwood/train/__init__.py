"""Training draft heads: data that the target itself wrote, one trainer, a loss for each method."""
