"""Makes the package importable for its tests whether it is installed or not."""
