"""Pure state machines and policies: no Ray, no torch, no clock, no I/O."""
