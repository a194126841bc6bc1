"""The one place that touches Ray Train's internals."""
