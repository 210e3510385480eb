"""What a user declares: model, cluster, batch, precision, optimizer, run; and the catalog of known ones."""
