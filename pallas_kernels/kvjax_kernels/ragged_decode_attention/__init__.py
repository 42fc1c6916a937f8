"""One query token a row over cached rows, each KV head with a length of its own."""
