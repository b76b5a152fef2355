"""Components of a training."""
