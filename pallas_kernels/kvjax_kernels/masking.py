"""What every implementation agrees on about masked scores."""

#: The score of a key that may not be seen. Not -inf: a row that sees nothing must give exp(x - max) = 0, not NaN.
MASKED = -1e30
