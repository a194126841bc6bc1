"""The control plane: checkpoint manager and run supervisor."""
