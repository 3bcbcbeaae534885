"""What the model can do: one file per skill, each with `document(rng, split)` and `questions(rng)`."""
