"""From a log of losses to the documents of its spikes, and to a run that goes on without them."""
