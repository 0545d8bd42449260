"""The pieces models are made of: projections, norms, rotary embedding, attention over a paged cache."""
