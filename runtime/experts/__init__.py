"""Which rank holds which experts, and how their load is balanced. Does not import torch."""
