"""Other libraries on parallel3d, as tests and docs/integrations.md run them."""
