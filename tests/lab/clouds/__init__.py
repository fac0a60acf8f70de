"""Clouds for tests: servers that speak their APIs, keep state, check signatures and fail on request."""
