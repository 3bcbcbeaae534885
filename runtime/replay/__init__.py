"""Records of a scheduler's decisions, and their replay."""
