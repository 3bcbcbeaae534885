"""The skills of the model, one file per skill. Each file defines `document(rng, split)` and `questions(rng)`."""
