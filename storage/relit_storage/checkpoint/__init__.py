"""What a checkpoint is on disk: image, shard, manifest, commit."""
