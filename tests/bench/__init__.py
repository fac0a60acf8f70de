"""Measurements of a whole daemon, alone or side by side with another implementation; see README.md."""
