"""Records the decisions of a scheduler to a file, and replays them."""
