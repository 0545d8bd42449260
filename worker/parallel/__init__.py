"""What ranks say to each other through torch: process groups, collectives, pipeline hops."""
