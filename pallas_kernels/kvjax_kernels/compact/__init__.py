"""Kept rows moved together, beside the old ones or in place of them."""
