"""The stages of a build: `graph` has their order; a stage's module has its tasks and their work."""
