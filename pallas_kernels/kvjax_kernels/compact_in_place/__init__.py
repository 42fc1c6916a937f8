"""Kept rows moved to the front of each head's own pages."""
