"""A module in hand as programs for a build: captured, saved as a folder, opened again by a worker."""
