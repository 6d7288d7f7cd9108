"""Logits split over the vocabulary: what a head returns, and what is computed from them."""
