"""The base class of mosaicml-streaming's datasets of images."""


class VisionDataset:
    """A class to inherit from."""
