"""Prompt texts written for this project."""
