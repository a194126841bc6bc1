"""The relit command."""
