"""The torch house: worlds of ranks, the wire between them, the executor of Programs, data, random numbers and checkpoints."""
