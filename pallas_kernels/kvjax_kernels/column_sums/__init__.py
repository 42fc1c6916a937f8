"""The attention that each token of a prompt gets in all, without the matrix of scores."""
