"""How condensed embeddings are. Imports torch only."""
