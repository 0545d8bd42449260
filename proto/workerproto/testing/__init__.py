"""A worker without a model, and the random walk with which any validator must agree."""
