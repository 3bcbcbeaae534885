"""Figures of one device, each next to the limit of its memory and arithmetic: `penstock bench gpu`."""
