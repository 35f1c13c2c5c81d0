"""A running pipeline in figures, for a terminal that looks on. No torch."""
