"""Opens, exports and serves a trained model, read from a run or a checkpoint."""
