"""Programs that feed the project damaged files and requests of any kind, and what they are made of."""
