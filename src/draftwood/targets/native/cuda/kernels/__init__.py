"""Small kernels between the products: rows, norms, the best entries."""
