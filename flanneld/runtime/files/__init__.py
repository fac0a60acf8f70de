"""Files: replaced in one step, with keys in them, and locks."""
