"""Data sets and the order in which a run consumes them."""
