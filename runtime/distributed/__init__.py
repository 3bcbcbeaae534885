"""Several processes for one model: how they find each other, exchange messages, start and end."""
