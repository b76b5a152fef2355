"""The names that mosaicml-streaming imports, for machines without torchvision; nothing of it is called."""
