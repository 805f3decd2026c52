"""Exports for other engines, and what runs inside them."""
