"""The log beyond its format: where it goes, its history, outages and repeated complaints."""
