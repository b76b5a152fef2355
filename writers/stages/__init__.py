"""The stages of a build, one module each: its tasks and the work they do."""
