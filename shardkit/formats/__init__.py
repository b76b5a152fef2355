"""File formats: MDS, WebDataset tar, text, token files, compression, tokenizers, provenance, usage logs."""
