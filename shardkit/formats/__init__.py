"""File formats: MDS, WebDataset tar, compression, usage logs."""
