"""What runs once per node: slots in shared memory, persist, upload, process watch."""
