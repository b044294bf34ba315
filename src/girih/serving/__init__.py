"""A trained model back: opened from a run or a checkpoint, read only."""
