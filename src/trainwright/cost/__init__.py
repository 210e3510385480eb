"""Physics: how long arithmetic, memory traffic and messages take, from plain numbers."""
