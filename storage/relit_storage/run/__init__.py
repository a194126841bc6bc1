"""The run directory: keys, lease, events."""
