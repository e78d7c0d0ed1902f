"""C4 → documents → sequences."""
