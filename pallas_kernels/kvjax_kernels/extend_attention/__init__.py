"""Attention of further tokens over cached and new ones, by position."""
