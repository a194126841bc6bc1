"""Example jobs, each runnable offline."""
