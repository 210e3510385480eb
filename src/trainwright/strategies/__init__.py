"""Parallel strategies: one file each. Options as a user writes them, and a pass that rewrites the actions of a template."""
