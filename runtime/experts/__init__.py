"""The placement of experts on ranks, and the balancing of their load. Does not import torch."""
