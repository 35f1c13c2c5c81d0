"""Pictures of results files: PNG, SVG, and one HTML page that holds them all."""
