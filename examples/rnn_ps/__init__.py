"""A language model whose embedding and decoder live on a parameter server."""
