"""What runs inside a rank: the loop's context, gradient sync, snapshots."""
