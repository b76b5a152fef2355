"""Recipes: the user's settings of a build, validated before it starts."""
