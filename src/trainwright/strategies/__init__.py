"""Parallel strategies: one file each. Options as a user writes them, and a pass that rewrites the actions of a template.

`PLACE` is a strategy's place in the order of passes: recompute 0, pipeline 1, data 2, zero 3, context 4, expert 5, tensor 6. The later a
pass, the closer to the compute is what it adds. The order of lines in a plan file numbers ranks and never changes this.
"""
