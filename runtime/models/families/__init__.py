"""One file per family: what layer i is made of, and how the configuration says so."""
