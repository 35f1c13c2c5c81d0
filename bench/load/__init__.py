"""Serving under load: requests that arrive over time, at our pipeline or another's server."""
