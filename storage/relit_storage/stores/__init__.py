"""Object stores: one protocol, several grounds."""
