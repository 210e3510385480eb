"""Plan: how a model is trained on a cluster; read from TOML, checked, written back, lowered to a Program."""
