"""Memory of a rank: what is measured, and what is paged."""
