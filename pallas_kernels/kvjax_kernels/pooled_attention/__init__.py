"""The attention that tokens get from the last queries, pooled along the tokens."""
