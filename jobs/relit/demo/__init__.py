"""relit demo: train, kill, resume, compare."""
