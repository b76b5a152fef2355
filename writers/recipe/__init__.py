"""A recipe: the user's words, checked before anything runs."""
