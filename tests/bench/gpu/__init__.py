"""The figures of one device, each beside what its memory and its arithmetic allow: `penstock bench gpu`."""
