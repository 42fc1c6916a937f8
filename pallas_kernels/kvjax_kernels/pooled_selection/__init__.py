"""The tokens that the last queries attend to: their votes, pooled along the tokens, and the highest of them."""
