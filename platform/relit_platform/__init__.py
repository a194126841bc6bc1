"""The machine of relit: supervisor, checkpoint manager, node agents, and the rank's loop."""
