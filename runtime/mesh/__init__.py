"""Ranks of one model: coordinates, groups and collectives. Layers import this package."""
