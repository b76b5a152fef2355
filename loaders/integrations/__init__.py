"""One thin module for each trainer, in the trainer's own names. Each imports its trainer; import only what you use."""
