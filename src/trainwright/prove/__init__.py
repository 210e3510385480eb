"""Proofs: the plan, shrunk, run on small worlds and held against an independent reference."""
