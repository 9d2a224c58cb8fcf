"""Engines: what continues a request from handed-over state."""
