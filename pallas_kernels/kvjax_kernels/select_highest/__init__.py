"""The choice of each head's highest scores."""
