"""The tokens that the last queries attend to most: `pooled_attention`, then `select_highest`."""
