"""Model families: a model as segments, parameters and activations. One file a family."""
