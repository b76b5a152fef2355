"""File formats: MDS, WebDataset tar, compression, provenance, usage logs."""
